"""What a quantized matrix is stored as, against the formulas of its scheme."""

import pytest
import torch
from torch import Tensor

from services.worker.quant import int4
from services.worker.quant.input_range import InputRange
from services.worker.quant.matrices import (
    QuantizedMatrix,
    quantize_dynamic,
    quantize_int4,
    quantize_static,
    stored_bytes,
)
from services.worker.quant.scheme import Scheme

OUT, IN = 24, 64
F32, I8, I32 = torch.float32, torch.int8, torch.int32


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(7, IN, generator=torch.Generator().manual_seed(1)) + 0.5


def form(matrix: QuantizedMatrix) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {leaf: (tuple(part.shape), part.dtype) for leaf, part in matrix.tensors.items()}


def test_dynamic_matrices_have_a_scale_per_output(weight: Tensor) -> None:
    matrix = quantize_dynamic(weight)
    column = ((OUT, 1), F32)
    assert form(matrix) == {
        "weight": ((OUT, IN), I8),
        "weight_scale": column,
        "weight_offset": column,
    }
    assert not bool(matrix.tensors["weight_offset"].any())
    assert 0 < matrix.error < 0.01


def test_static_products_give_back_the_float_product(weight: Tensor, inputs: Tensor) -> None:
    chosen = InputRange(scale=1 / 32, zero_point=-20)
    matrix = quantize_static(weight, chosen)
    assert form(matrix) == {
        "weight": ((OUT, IN), I8),
        "input_scale": ((1,), F32),
        "input_offset": ((1,), F32),
        "deq_scale": ((OUT,), F32),
        "quant_bias": ((OUT,), I32),
    }
    part = matrix.tensors
    levels = (inputs / part["input_scale"] + part["input_offset"]).round().clamp(-128, 127)
    sums = levels.long() @ part["weight"].long().t() + part["quant_bias"]
    product = sums * part["deq_scale"]
    # Errors of 64 inputs (half a step of 1/32 each, uniform: 0.009) and of 64 weights (half a step
    # of about 0.02: 0.006) add up as independent ones; five standard deviations.
    spread = 5 * (IN * (0.009**2 + 0.006**2)) ** 0.5
    torch.testing.assert_close(product, inputs @ weight.t(), rtol=0, atol=spread)


def test_int4_matrices_lie_two_to_a_byte(weight: Tensor) -> None:
    matrix = quantize_int4(weight, None, is_down=False)
    column = ((OUT, 1), F32)
    assert form(matrix) == {
        "weight": ((OUT // 2, IN), I8),
        "weight_scale": column,
        "weight_offset": column,
        "scale_bias": column,
    }
    part = matrix.tensors
    levels = int4.unpack(part["weight"])
    lost = (levels * part["weight_scale"] - weight).norm() / weight.norm()
    assert float(lost) == pytest.approx(matrix.error, rel=1e-5)
    # A normal distribution in 15 steps loses a tenth of its size.
    assert 0.05 < matrix.error < 0.15
    sums = 8 * levels.sum(1, keepdim=True) * part["weight_scale"]
    torch.testing.assert_close(part["scale_bias"], sums)


def test_an_int4_down_projection_has_sixteen_compensations(weight: Tensor) -> None:
    matrix = quantize_int4(weight, torch.ones(IN), is_down=True)
    assert matrix.tensors["scale_bias"].shape == (OUT, 16)


@pytest.mark.parametrize("is_down", [False, True])
def test_the_size_is_known_beforehand(weight: Tensor, is_down: bool) -> None:
    made = {
        Scheme.W8A8: quantize_static(weight, InputRange(scale=1.0, zero_point=3)),
        Scheme.W8A8_DYNAMIC: quantize_dynamic(weight),
        Scheme.W4A8_DYNAMIC: quantize_int4(weight, None, is_down=is_down),
    }
    for scheme, matrix in made.items():
        size = sum(part.nbytes for part in matrix.tensors.values())
        assert stored_bytes(scheme, OUT, IN, is_down=is_down) == size, scheme


def test_bfloat16_weights_are_quantized_like_their_float32_values(weight: Tensor) -> None:
    half = weight.to(torch.bfloat16)
    made, expected = quantize_dynamic(half), quantize_dynamic(half.float())
    assert all(torch.equal(made.tensors[leaf], expected.tensors[leaf]) for leaf in made.tensors)
