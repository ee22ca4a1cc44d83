"""Quantization in tiles of 128 lanes: the formula, its error, and what has no scale."""

from typing import Any

import pytest
import torch

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(kernels: Any, x: torch.Tensor, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"dst_type": torch.int8, "row_block_size": 1, "col_block_size": 128} | changes
    return kernels["npu_dynamic_block_quant"](x, **arguments)


def restore(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (y.float().unflatten(-1, (-1, 128)) * scale[..., None]).flatten(-2)


@pytest.mark.parametrize("eight", LIMITS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(5, 1, 512), (5, 512), (3, 2, 256)])
def test_lanes_are_divided_by_the_scale_of_their_tile(
    kernels: Any,
    dtype: torch.dtype,
    eight: torch.dtype,
    shape: tuple[int, ...],
    generator: torch.Generator,
) -> None:
    x = (torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[-1])).to(dtype)
    y, scale = quantize(kernels, x, dst_type=eight)
    assert (y.shape, y.dtype, scale.dtype) == (x.shape, eight, torch.float32)
    tiles = x.float().unflatten(-1, (-1, 128))
    assert torch.equal(scale, tiles.abs().amax(-1) / LIMITS[eight])
    error = (restore(y, scale) - x.float()).abs().unflatten(-1, (-1, 128))
    # int8: half a step of the tile's scale. float8: half of 1/8 of the number, or, below 2^-6 of a
    # step, half of 2^-9. Float32 rounds quotient and product.
    if eight == torch.int8:
        allowed = 0.5 * scale[..., None].expand_as(error)
    else:
        allowed = torch.maximum(tiles.abs() / 16, scale[..., None] * 2.0**-10)
    assert bool((error <= allowed * (1 + 1e-4)).all())


def test_every_version_rounds_alike(
    compiled: dict[str, Any], dtype: torch.dtype, generator: torch.Generator
) -> None:
    from services.worker.ops import registry

    x = torch.randn((70, 1, 512), generator=generator).to(dtype)
    x[:, 0, ::3] = (x[:, 0, ::3] * 4).round() / 4  # ties among them
    expected = quantize(registry.cpu_kernels(None), x)
    for native in compiled.values():
        result = quantize(registry.cpu_kernels(native), x)
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[1], expected[1])


def test_rows_may_lie_apart(kernels: Any, dtype: torch.dtype, generator: torch.Generator) -> None:
    wide = torch.randn((6, 1, 1, 600), generator=generator).to(dtype)
    x = wide.view(6, 1, 600)[..., :512]
    result, whole = quantize(kernels, x), quantize(kernels, x.contiguous())
    assert torch.equal(result[0], whole[0])
    assert torch.equal(result[1], whole[1])


@pytest.mark.parametrize("eight", LIMITS, ids=lambda dtype: str(dtype)[6:])
def test_zeros_and_broken_numbers_have_a_scale_that_says_so(
    kernels: Any, dtype: torch.dtype, eight: torch.dtype
) -> None:
    x = torch.ones((1, 1, 512), dtype=dtype)
    x[..., :128] = 0
    x[..., 130] = float("nan")
    x[..., 300] = float("-inf")
    y, scale = quantize(kernels, x, dst_type=eight)
    assert scale[0, 0, 0] == 0
    assert scale[0, 0, 1].isnan()
    assert scale[0, 0, 2].isinf()
    assert y[..., :384].float().count_nonzero() == 0
    restored = restore(y, scale)
    assert restored[..., :128].count_nonzero() == 0
    assert bool(restored[..., 128:384].isnan().all())
    torch.testing.assert_close(restored[..., 384:], x[..., 384:].float())


@pytest.mark.parametrize(
    ("x", "change", "reason"),
    [
        (torch.zeros(2, 100), {}, "multiple of 128"),
        (torch.zeros(128), {}, "must be"),
        (torch.zeros(2, 128, dtype=torch.float16), {}, "bfloat16 or float32"),
        (torch.zeros(2, 128), {"dst_type": torch.int32}, "dst_type"),
        (torch.zeros(2, 128), {"row_block_size": 2}, "1 by 128"),
        (torch.zeros(2, 128), {"col_block_size": 64}, "1 by 128"),
        (torch.zeros(2, 128), {"round_mode": "floor"}, "round_mode"),
        (torch.zeros(2, 128), {"dst_type_max": 1.0}, "dst_type_max"),
        (torch.zeros(2, 128), {"min_scale": 0.1}, "min_scale"),
    ],
)
def test_what_the_device_does_not_take_is_refused(
    kernels: Any, x: torch.Tensor, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=reason):
        quantize(kernels, x, **change)
