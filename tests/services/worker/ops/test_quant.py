"""Dense int8 operators against exact integer sums and float64 formulas."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz, quant

BF16, F32, INT32, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn
SIZES = [(192, 128), (1, 1), (37, 42), (600, 72), (128, 33)]


def random_int8(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def random_scales(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.rand(count, generator=generator) * 1e-2 + 1e-4


def layout(kernels: Any, weight: torch.Tensor, is_packed: bool) -> torch.Tensor:
    packed: torch.Tensor = kernels["npu_format_cast"](weight, 29 if is_packed else 2)
    return packed


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


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("inner", "outer"), SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 13, 49, 100])
def test_sums_are_exact(
    kernels: Any,
    generator: torch.Generator,
    tokens: int,
    inner: int,
    outer: int,
    is_packed: bool,
) -> None:
    x = random_int8(generator, tokens, inner + 3)[:, 3:]
    weight = random_int8(generator, inner, outer)
    bias = torch.randint(-(2**20), 2**20, (outer,), generator=generator, dtype=INT32)
    sums = kernels["npu_quant_matmul"](
        x, layout(kernels, weight, is_packed), torch.ones(outer), bias=bias, output_dtype=INT32
    )
    assert torch.equal(sums.long(), x.long() @ weight.long() + bias)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_longest_rows_of_the_largest_numbers_do_not_overflow(
    kernels: Any, is_packed: bool
) -> None:
    x = torch.full((1, 65535), -128, dtype=torch.int8)
    weight = torch.full((65535, 2), -128, dtype=torch.int8)
    weight[:, 1] = 127
    packed = layout(kernels, weight, is_packed)
    sums = kernels["npu_quant_matmul"](x, packed, torch.ones(2), output_dtype=INT32)
    assert sums.tolist() == [[65535 * 128 * 128, -65535 * 128 * 127]]


@pytest.mark.parametrize(("scale_type", "output"), [(F32, F32), (F32, BF16), (BF16, BF16)])
@pytest.mark.parametrize("has_row_scales", [False, True])
@pytest.mark.parametrize("bias_type", [None, INT32])
def test_scaled_sums_are_right_to_the_last_bit(
    kernels: Any,
    generator: torch.Generator,
    scale_type: torch.dtype,
    output: torch.dtype,
    has_row_scales: bool,
    bias_type: torch.dtype | None,
) -> None:
    x, weight = random_int8(generator, 50, 192), random_int8(generator, 192, 72)
    scale = random_scales(generator, 72).to(scale_type)
    row_scales = random_scales(generator, 50) if has_row_scales else None
    bias = torch.arange(72, dtype=INT32) * 1000 if bias_type else None
    result = kernels["npu_quant_matmul"](
        x,
        layout(kernels, weight, True),
        scale,
        pertoken_scale=row_scales,
        bias=bias,
        output_dtype=output,
    )
    sums = x.long() @ weight.long() + (0 if bias is None else bias)
    # Each step in float32, in this order.
    expected = sums.float() * scale.float()
    expected = expected if row_scales is None else expected * row_scales[:, None]
    assert result.dtype == output
    assert torch.equal(result, expected.to(output))


@pytest.mark.parametrize(("bias_type", "output"), [(F32, F32), (F32, BF16), (BF16, BF16)])
def test_a_float_bias_is_added_to_the_scaled_sums(
    kernels: Any, generator: torch.Generator, bias_type: torch.dtype, output: torch.dtype
) -> None:
    x, weight = random_int8(generator, 7, 64), random_int8(generator, 64, 40)
    scale, row_scales = random_scales(generator, 1), random_scales(generator, 7)
    bias = torch.randn(40, generator=generator).to(bias_type)
    result = kernels["npu_quant_matmul"](
        x, weight, scale, pertoken_scale=row_scales, bias=bias, output_dtype=output
    )
    sums = (x.long() @ weight.long()).double()
    scaled = sums * scale.double() * row_scales.double()[:, None]
    # The product is rounded before the sum or with it; the result once to its type.
    bound = scaled.abs() * 2**-22 + (scaled + bias).abs() * (2**-24 if output == F32 else 2**-8)
    assert bool(((result.double() - scaled - bias).abs() <= bound).all())


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_row_does_not_depend_on_its_batch_or_on_threads(
    compiled: dict[str, Any], generator: torch.Generator, is_packed: bool
) -> None:
    native = next(iter(compiled.values()))
    kernels = quant.kernels(native)
    x = torch.randn((130, 700), generator=generator)
    weight = layout(kernels, random_int8(generator, 700, 300), is_packed)
    scale = random_scales(generator, 300)

    def linear(rows: torch.Tensor) -> torch.Tensor:
        quantized, scales = kernels["npu_dynamic_quant"](rows)
        return kernels["npu_quant_matmul"](
            quantized, weight, scale, pertoken_scale=scales, output_dtype=F32
        )

    together = linear(x)
    native.set_num_threads(3)
    try:
        assert torch.equal(linear(x), together)
        for rows in (slice(0, 1), slice(3, 5), slice(60, 130)):
            assert torch.equal(linear(x[rows]), together[rows])
    finally:
        native.set_num_threads(1)


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
    "misuse",
    [
        lambda w: w[:, :32],
        lambda w: w[:64],
        lambda w: w.t(),
        lambda w: w.clone(),
        lambda w: w.contiguous(),
        lambda w: torch.cat([w, w]),
        lambda w: w[:, 32:].clone(),
    ],
)
def test_a_packed_weight_cut_or_copied_gives_no_numbers(kernels: Any, misuse: Any) -> None:
    weight = torch.randint(-127, 128, (96, 64), dtype=torch.int8)
    wrong = misuse(kernels["npu_format_cast"](weight, nz.FRACTAL_NZ))
    x = torch.ones(2, wrong.shape[0], dtype=torch.int8)
    with pytest.raises(ValueError, match=r"not contiguous|cut or copied|copy of|part of"):
        kernels["npu_quant_matmul"](x, wrong, torch.ones(wrong.shape[1]), output_dtype=F32)


def test_a_parameter_of_a_packed_weight_is_still_packed(
    kernels: Any, generator: torch.Generator
) -> None:
    x, weight = random_int8(generator, 3, 64), random_int8(generator, 64, 40)
    packed = kernels["npu_format_cast"](weight, nz.FRACTAL_NZ)
    parameter = torch.nn.Parameter(packed, requires_grad=False)
    sums = kernels["npu_quant_matmul"](x, parameter, torch.ones(40), output_dtype=INT32)
    assert torch.equal(sums.long(), x.long() @ weight.long())


def multiply(kernels: Any, **changes: Any) -> Any:
    arguments = {
        "x1": torch.zeros(3, 8, dtype=torch.int8),
        "x2": torch.ones(8, 4, dtype=torch.int8),
        "scale": torch.ones(4),
        "output_dtype": BF16,
    } | changes
    return kernels["npu_quant_matmul"](**arguments)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x1": torch.zeros(3, 8)}, "must be int8"),
        ({"x1": torch.zeros(3, 9, dtype=torch.int8)}, "x1 must be"),
        ({"x2": torch.ones(4, 8, dtype=torch.int8).t()}, "not contiguous"),
        ({"output_dtype": None}, "output_dtype"),
        ({"output_dtype": torch.float16}, "output_dtype"),
        ({"scale": torch.ones(3)}, "must be [N] or [1]"),
        ({"scale": torch.ones(8)[::2]}, "must be flat"),
        ({"scale": torch.ones(4).double()}, "float32 or bfloat16"),
        ({"scale": torch.ones(4).bfloat16(), "output_dtype": F32}, "bfloat16 scale"),
        ({"pertoken_scale": torch.ones(4)}, "must be [M] float32"),
        ({"pertoken_scale": torch.ones(6)[::2]}, "not contiguous"),
        ({"pertoken_scale": torch.ones(3), "output_dtype": INT32}, "no pertoken_scale"),
        ({"bias": torch.ones(3, dtype=INT32)}, "must be flat [N]"),
        ({"bias": torch.ones(4), "output_dtype": INT32}, "int32 bias"),
        ({"bias": torch.ones(4).bfloat16(), "output_dtype": F32}, "bfloat16 bias"),
        ({"offset": torch.ones(4)}, "offset is not supported"),
        ({"group_sizes": [1, 128, 128]}, "group_sizes is not supported"),
    ],
)
def test_products_outside_the_contract_are_refused(
    kernels: Any, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        multiply(kernels, **changes)


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
