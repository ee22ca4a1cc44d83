"""Quantization of rows against float64 formulas, and changes of layout."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz

BF16, F32, INT32, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn


def test_a_row_is_quantized_by_its_largest_value(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    wide = torch.randn((9, 205), generator=generator).to(dtype)
    x = wide[:, 5:]  # rows lie apart, as in a slice of a fused projection
    quantized, scales = kernels["npu_dynamic_quant"](x)
    assert (quantized.dtype, scales.dtype, scales.shape) == (torch.int8, F32, (9,))
    exact = x.double().abs().amax(1) / 127
    torch.testing.assert_close(scales.double(), exact, rtol=2**-24, atol=0)
    # Half a step, and what the rounding of the scale shifts 127 of them by.
    error = (quantized.double() * scales.double()[:, None] - x.double()).abs()
    assert bool((error <= exact[:, None] * (0.5 + 127 * 2**-23)).all())
    assert quantized.abs().amax(1).tolist() == [127] * 9


def test_ties_go_to_the_even_number(kernels: Any) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert kernels["npu_dynamic_quant"](x)[0].tolist() == [[127, 0, 2, 2, 0, -2]]
    one, half = torch.ones(1), torch.tensor([0.5])
    static = kernels["npu_quantize"](x - 0.5, one, half, torch.qint8, -1, False)
    assert static.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_a_row_of_zeros_stays_zero_with_a_finite_scale(kernels: Any, dtype: torch.dtype) -> None:
    quantized, scales = kernels["npu_dynamic_quant"](torch.zeros(2, 40, dtype=dtype))
    assert not quantized.any()
    assert bool(scales.isfinite().all())


def test_a_broken_row_says_so_and_leaves_the_others_alone(kernels: Any) -> None:
    x = torch.ones(4, 40)
    x[1, 7], x[2, 39] = float("nan"), float("inf")
    quantized, scales = kernels["npu_dynamic_quant"](x)
    assert scales.isfinite().tolist() == [True, False, False, True]
    assert quantized[[0, 3]].unique().tolist() == [127]


def test_leading_sizes_are_rows(kernels: Any, generator: torch.Generator) -> None:
    x = torch.randn((3, 4, 64), generator=generator)
    for view in (x, x.transpose(0, 1)):
        quantized, scales = kernels["npu_dynamic_quant"](view)
        flat, flat_scales = kernels["npu_dynamic_quant"](view.reshape(12, 64))
        assert torch.equal(quantized, flat.view(view.shape))
        assert torch.equal(scales, flat_scales.view(view.shape[:2]))


def test_fp8_rows_reach_its_largest_number(kernels: Any, generator: torch.Generator) -> None:
    x = torch.randn((5, 128), generator=generator).to(BF16)
    quantized, scales = kernels["npu_dynamic_quant"](x, dst_type=FP8)
    assert quantized.dtype == FP8
    assert quantized.float().abs().amax(1).tolist() == [448.0] * 5
    # Three bits after the point: half a step is 2^-4 of a number, and below 2^-6 a fixed 2^-10.
    error = (quantized.float() * scales[:, None] - x.float()).abs()
    assert bool((error <= x.float().abs() * 2**-4 + scales[:, None] * 2**-10).all())


@pytest.mark.parametrize("count", [1, 70])
@pytest.mark.parametrize("has_zero_points", [False, True])
def test_static_rows_are_scaled_and_shifted(
    kernels: Any,
    dtype: torch.dtype,
    generator: torch.Generator,
    count: int,
    has_zero_points: bool,
) -> None:
    x = torch.randn((9, 75), generator=generator).to(dtype)[:, 5:]
    scales = (torch.rand(count, generator=generator) * 60 + 20).to(dtype)
    zeros = torch.randint(-9, 9, (count,), generator=generator).to(dtype)
    shifts = zeros if has_zero_points else None
    result = kernels["npu_quantize"](x, scales, shifts, torch.qint8, -1, False)
    exact = x.double() * scales.double() + (zeros.double() if has_zero_points else 0)
    assert result.dtype == torch.int8
    # float32 rounds values up to 2^9 by 2^-15 at most, twice; only that close to a tie may differ.
    error = (result.double() - exact.clamp(-128, 127)).abs()
    assert bool((error <= 0.5 + 2**-14).all())


def test_static_rows_stay_within_int8(kernels: Any) -> None:
    x = torch.tensor([[1e30, -1e30, 200.0, -200.0, float("inf"), float("-inf")]])
    result = kernels["npu_quantize"](x, torch.ones(1), None, torch.qint8, 1, False)
    assert result.tolist() == [[127, -128, 127, -128, 127, -128]]


@pytest.mark.parametrize("shape", [(5, 7), (600, 72), (3, 37, 40)])
@pytest.mark.parametrize("weight_type", [torch.int8, INT32])
def test_all_versions_pack_alike_and_back(
    kernels: Any, generator: torch.Generator, shape: tuple[int, ...], weight_type: torch.dtype
) -> None:
    weight = torch.randint(-128, 128, shape, generator=generator, dtype=weight_type)
    packed = kernels["npu_format_cast"](weight, nz.FRACTAL_NZ)
    assert bytes(packed.untyped_storage()) == bytes(nz.pack(weight).untyped_storage())
    assert torch.equal(kernels["npu_format_cast"](packed, nz.ND), weight)
    assert nz.is_nz(kernels["npu_format_cast"](packed, nz.FRACTAL_NZ))


def test_float_weights_keep_the_one_layout_they_have(kernels: Any) -> None:
    weight = torch.randn(8, 4)
    assert torch.equal(kernels["npu_format_cast"](weight, nz.FRACTAL_NZ), weight)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda k: k["npu_dynamic_quant"](torch.zeros(4)), "two dimensions"),
        (lambda k: k["npu_dynamic_quant"](torch.zeros(2, 4).double()), "bfloat16 or float32"),
        (lambda k: k["npu_dynamic_quant"](torch.zeros(2, 4), dst_type=3), "dst_type"),
        (
            lambda k: k["npu_dynamic_quant"](torch.zeros(2, 4), smooth_scales=torch.ones(4)),
            "smooth_scales",
        ),
        (lambda k: k["npu_dynamic_quant"](torch.zeros(2, 4), quant_mode="pertensor"), "quant_mode"),
        (lambda k: k["npu_format_cast"](torch.zeros(2, 4), 3), "format 3"),
        (lambda k: k["npu_format_cast"](torch.zeros(2, 4), 29, customize_dtype=1), "other types"),
        (lambda k: k["npu_format_cast"](torch.zeros(4), 29), "must be"),
    ],
)
def test_other_calls_outside_the_contract_are_refused(kernels: Any, call: Any, reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        call(kernels)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scales": torch.ones(8).bfloat16()}, "types"),
        ({"scales": torch.ones(3)}, "must be [E] or [1]"),
        ({"scales": torch.ones(16)[::2]}, "not contiguous"),
        ({"zero_points": torch.ones(1)}, "zero_points"),
        ({"dtype": torch.quint8}, "must be qint8"),
        ({"axis": 0}, "axis 0"),
        ({"div_mode": True}, "div_mode"),
    ],
)
def test_static_quantization_outside_the_contract_is_refused(
    kernels: Any, changes: dict[str, Any], reason: str
) -> None:
    arguments = {
        "input": torch.zeros(3, 8),
        "scales": torch.ones(8),
        "zero_points": torch.ones(8),
        "dtype": torch.qint8,
        "axis": -1,
        "div_mode": False,
    } | changes
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        kernels["npu_quantize"](**arguments)
