"""Dense int8 products against exact integer sums and float64 formulas."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz, quant, quant_product

BF16, F32, INT32 = torch.bfloat16, torch.float32, torch.int32
# 300 columns: more strips than one row is multiplied with at a time, then a whole one and a part.
SIZES = [(192, 128), (1, 1), (37, 42), (600, 72), (128, 33), (64, 300)]


def random_int8(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def random_scales(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.rand(count, generator=generator) * 1e-2 + 1e-4


def layout(kernels: Any, weight: torch.Tensor, is_packed: bool) -> torch.Tensor:
    packed: torch.Tensor = kernels["npu_format_cast"](weight, 29 if is_packed else 2)
    return packed


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
    kernels = quant.kernels(native) | quant_product.kernels(native)
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
        ({"x1": torch.zeros(3, 8)}, "must be int8 [M, 8]"),
        ({"x1": torch.zeros(3, 9, dtype=torch.int8)}, "must be int8 [M, 8]"),
        ({"x1": torch.zeros(8, dtype=torch.int8)}, "must be int8 [M, 8]"),
        ({"x2": torch.ones(8, 4)}, "x2 must be int8"),
        ({"x2": torch.ones(1, 8, 4, dtype=torch.int8)}, "x2 must be int8"),
        ({"x2": torch.ones(4, 8, dtype=torch.int8).t()}, "not contiguous"),
        ({"output_dtype": None}, "output_dtype"),
        ({"output_dtype": torch.float16}, "output_dtype"),
        ({"scale": torch.ones(3)}, "must be [N] or [1]"),
        ({"scale": torch.ones(8)[::2]}, "must be flat"),
        ({"scale": torch.ones(4).double()}, "float32 or bfloat16"),
        ({"scale": torch.ones(4).bfloat16(), "output_dtype": F32}, "bfloat16 scale"),
        ({"pertoken_scale": torch.ones(4)}, "must be flat float32 [3]"),
        ({"pertoken_scale": torch.ones(3, 1)}, "must be flat float32 [3]"),
        ({"pertoken_scale": torch.ones(3).double()}, "must be flat float32 [3]"),
        ({"pertoken_scale": torch.ones(6)[::2]}, "must be flat float32 [3]"),
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


def test_a_weight_is_checked_again_when_it_is_used_otherwise(kernels: Any) -> None:
    x, weight = torch.ones(2, 8, dtype=torch.int8), torch.ones(8, 4, dtype=torch.int8)
    ones, twos, halves = torch.ones(4), torch.full((1,), 2.0), torch.full((4,), 0.5)
    bias = torch.ones(4, dtype=INT32)
    for _ in range(2):
        for changes, value in [
            ({"scale": ones}, 8),
            ({"scale": twos}, 16),
            ({"scale": ones, "bias": bias}, 9),
            ({"scale": ones, "output_dtype": INT32}, 8),
            ({"scale": ones, "pertoken_scale": halves[:2]}, 4),
        ]:
            assert multiply(kernels, x1=x, x2=weight, **changes).unique().tolist() == [value]
        with pytest.raises(ValueError, match="offset is not supported"):
            multiply(kernels, x1=x, x2=weight, scale=ones, offset=ones)
        with pytest.raises(ValueError, match="must be int8"):
            multiply(kernels, x1=x[:, :7], x2=weight, scale=ones)
    weight.resize_(4, 4)
    with pytest.raises(ValueError, match=r"must be int8 \[M, 4\]"):
        multiply(kernels, x1=x, x2=weight, scale=ones)
