"""Cache writes: the right rows, nothing else, and refusals of the known traps."""

from typing import Any

import pytest
import torch

C, R = 512, 64


def inputs(tokens: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    wide = torch.randn((tokens, 1, 1, C + R + 32), generator=generator).to(dtype)
    angles = torch.rand((tokens, 32), generator=generator) * 6
    both = torch.cat((angles, angles), -1).view(tokens, 1, 1, R)
    return {
        "kv": wide[..., 32:],  # a slice of the fused projection, not contiguous
        "gamma": torch.randn(C, generator=generator).to(dtype),
        "cos": both.cos().to(dtype),
        "sin": both.sin().to(dtype),
        "k_cache": torch.full((3, 128, 1, R), 7.0).to(dtype),
        "ckv_cache": torch.full((3, 128, 1, C), 7.0).to(dtype),
    }


def write(kernels: Any, data: dict[str, torch.Tensor], index: torch.Tensor, **changes: Any) -> Any:
    arguments = {"epsilon": 1e-5, "cache_mode": "PA"} | changes
    return kernels["npu_kv_rmsnorm_rope_cache_v2"](
        data["kv"], data["gamma"], data["cos"], data["sin"], index, data["k_cache"],
        data["ckv_cache"], **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("is_output_kv", [False, True])
def test_normed_latent_and_rotated_key_land_in_their_slots(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator, is_output_kv: bool
) -> None:
    data = inputs(4, dtype, generator)
    index = torch.tensor([300, 5, -1, 128])
    returned = write(kernels, data, index, is_output_kv=is_output_kv)
    kv = data["kv"].float().view(4, C + R)
    latent = kv[:, :C] / (kv[:, :C].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    latent = latent * data["gamma"].float()
    first, second = kv[:, C::2], kv[:, C + 1 :: 2]
    cos, sin = data["cos"].float().view(4, R)[:, :32], data["sin"].float().view(4, R)[:, :32]
    rope = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    bound = 1e-5 if dtype == torch.float32 else 2**-7  # one rounding of values up to 4
    latents, ropes = data["ckv_cache"].float().view(-1, C), data["k_cache"].float().view(-1, R)
    for token, slot in enumerate(index.tolist()):
        if slot >= 0:
            torch.testing.assert_close(latents[slot], latent[token], atol=bound, rtol=bound)
            torch.testing.assert_close(ropes[slot], rope[token], atol=bound, rtol=bound)
    untouched = torch.ones(3 * 128, dtype=torch.bool)
    untouched[index[index >= 0]] = False
    assert latents[untouched].unique().tolist() == [7.0]
    assert ropes[untouched].unique().tolist() == [7.0]
    assert (returned[0].numel() > 0) == is_output_kv


def test_swapped_caches_are_refused(kernels: Any, generator: torch.Generator) -> None:
    data = inputs(1, torch.float32, generator)
    data["k_cache"], data["ckv_cache"] = data["ckv_cache"], data["k_cache"]
    with pytest.raises(ValueError, match="rotary cache"):
        write(kernels, data, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_mode": "Norm"}, "cache_mode"),
        ({"k_rope_scale": torch.ones(1)}, "k_rope_scale"),
    ],
)
def test_modes_that_are_not_paged_bf16_are_refused(
    kernels: Any, generator: torch.Generator, change: dict[str, Any], reason: str
) -> None:
    data = inputs(1, torch.float32, generator)
    with pytest.raises(ValueError, match=reason):
        write(kernels, data, torch.zeros(1, dtype=torch.int64), **change)


def test_int32_slots_are_refused_as_on_the_device(kernels: Any, generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="int64"):
        write(kernels, inputs(1, torch.float32, generator), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_scatter_sets_rows_and_skips_minus_one(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator, index_dtype: torch.dtype
) -> None:
    cache = torch.zeros((10, 128), dtype=dtype)
    updates = torch.randn((3, 128), generator=generator).to(dtype)
    indices = torch.tensor([[7], [-1], [0]], dtype=index_dtype)
    returned = kernels["npu_scatter_nd_update_"](cache, indices, updates)
    assert returned.data_ptr() == cache.data_ptr()
    assert torch.equal(cache[7], updates[0])
    assert torch.equal(cache[0], updates[2])
    assert cache[1:7].count_nonzero() == 0
    assert cache[8:].count_nonzero() == 0


@pytest.mark.parametrize(
    ("width", "row_type"), [(656, torch.int8), (128, torch.int8), (1, torch.float16)]
)
def test_scatter_writes_packed_rows_keys_and_scales_as_they_are(
    kernels: Any, generator: torch.Generator, width: int, row_type: torch.dtype
) -> None:
    wide = torch.randint(-128, 128, (3, width + 8), generator=generator).to(row_type)
    updates = wide[:, :width]  # rows may lie apart
    cache = torch.full((5, width), 7, dtype=row_type)
    kernels["npu_scatter_nd_update_"](cache, torch.tensor([[4], [-1], [0]]), updates)
    assert torch.equal(cache[4], updates[0])
    assert torch.equal(cache[0], updates[2])
    assert cache[1:4].unique().tolist() == [7]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (torch.zeros((1, 8), dtype=torch.float16), r"must be torch\.int8"),
        (torch.zeros((1, 9), dtype=torch.int8), "updates must be"),
    ],
)
def test_scatter_refuses_rows_of_another_kind(
    kernels: Any, rows: torch.Tensor, reason: str
) -> None:
    cache = torch.zeros((4, 8), dtype=torch.int8)
    with pytest.raises(ValueError, match=reason):
        kernels["npu_scatter_nd_update_"](cache, torch.tensor([[1]]), rows)


def test_scatter_refuses_types_no_cache_has(kernels: Any) -> None:
    rows = torch.zeros((1, 8), dtype=torch.int32)
    with pytest.raises(ValueError, match="not written"):
        kernels["npu_scatter_nd_update_"](rows.repeat(4, 1), torch.tensor([[1]]), rows)


def test_a_slot_outside_the_cache_is_refused(
    compiled: dict[str, Any], generator: torch.Generator
) -> None:
    from services.worker.ops import registry

    for native in compiled.values():
        kernels = registry.cpu_kernels(native)
        with pytest.raises(ValueError, match="outside"):
            write(kernels, inputs(1, torch.float32, generator), torch.tensor([3 * 128]))
        with pytest.raises(ValueError, match="outside"):
            kernels["npu_scatter_nd_update_"](
                torch.zeros((4, 8)), torch.tensor([[4]]), torch.zeros((1, 8))
            )
