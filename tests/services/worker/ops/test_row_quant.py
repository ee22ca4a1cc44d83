"""Rows quantized by the torch version."""

import math

import pytest
import torch

from services.worker.ops.row_quant import quantize_rows


def test_the_largest_value_becomes_127_and_halves_go_to_even() -> None:
    rows, scales = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5], [-254.0, 1.0, 3.0, 0.0]]))
    assert rows.tolist() == [[127, 0, 2, -2], [-127, 0, 2, 0]]
    assert scales.tolist() == [1.0, 2.0]
    assert rows.dtype is torch.int8


def test_a_row_of_zeros_has_scale_zero() -> None:
    rows, scales = quantize_rows(torch.zeros((2, 3), dtype=torch.bfloat16))
    assert rows.count_nonzero() == 0
    assert scales.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_in_its_scale(value: float) -> None:
    rows, scales = quantize_rows(torch.tensor([[1.0, value], [1.0, 2.0]]))
    assert rows.tolist() == [[0, 0], [64, 127]]
    assert not math.isfinite(scales[0])
    assert math.isfinite(scales[1])
