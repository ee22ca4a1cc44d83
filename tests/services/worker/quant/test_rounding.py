"""Weights to levels: within half a step, with scales that nobody rounds again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.worker.quant import rounding
from services.worker.quant.rounding import relative_error, round_int4, round_int8

Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]


def weight(seed: int = 0, size_out: int = 24, size_in: int = 96) -> Tensor:
    return torch.randn(size_out, size_in, generator=torch.Generator().manual_seed(seed))


def test_int8_levels_are_within_half_a_step() -> None:
    source = weight()
    levels, scales = round_int8(source)
    assert levels.dtype == torch.int8
    assert scales.shape == (24, 1)
    assert scales.dtype == torch.float32
    assert int(levels.abs().max()) == 127
    # Half a step; where the scale was rounded down (at most by 2^-9) the largest is cut off by
    # less than 127 * 2^-9 of a step.
    assert bool(((levels * scales - source).abs() <= 0.5 * scales * (1 + 1e-6)).all())


@pytest.mark.parametrize("quantize", [round_int8, round_int4])
def test_scales_are_exact_in_bfloat16(quantize: Rounding) -> None:
    _, scales = quantize(weight())
    assert torch.equal(scales.to(torch.bfloat16).float(), scales)


@pytest.mark.parametrize("quantize", [round_int8, round_int4])
def test_zeros_have_a_scale_that_can_be_divided_by(quantize: Rounding) -> None:
    levels, scales = quantize(torch.zeros(4, 16))
    assert not bool(levels.any())
    assert bool((scales > 0).all())


def test_int4_levels_use_the_whole_range() -> None:
    levels, _ = round_int4(weight())
    assert int(levels.min()) >= -8
    assert int(levels.max()) <= 7
    assert len(levels.unique()) == 16


def error(source: Tensor, levels: Tensor, scales: Tensor, importance: Tensor) -> Tensor:
    return ((levels * scales - source) ** 2 * importance).sum(1)


def test_the_search_beats_the_largest_weight_for_a_scale() -> None:
    source = weight()
    levels, scales = round_int4(source)
    plain = source.abs().amax(1, keepdim=True) / 7
    rounded = (source / plain).round()
    ones = torch.ones(96)
    found, before = error(source, levels, scales, ones), error(source, rounded, plain, ones)
    # 1 percent for the scale that bfloat16 rounds; most outputs gain much more.
    assert bool((found <= 1.01 * before).all())
    assert float(found.sum()) < 0.9 * float(before.sum())


def test_inputs_that_are_large_count_more() -> None:
    source, moments = weight(), torch.ones(96)
    moments[:8] = 1000.0
    aware, blind = round_int4(source, moments), round_int4(source)
    assert float(error(source, *aware, moments).sum()) < 0.8 * float(
        error(source, *blind, moments).sum()
    )


def test_inputs_that_were_never_seen_still_count() -> None:
    source, moments = weight(), torch.zeros(96)
    moments[0] = 1.0
    levels, scales = round_int4(source, moments)
    assert relative_error(source, levels, scales) < 0.5


def test_a_matrix_in_blocks_is_rounded_as_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source, moments = weight(), torch.rand(96)
    whole = (*round_int8(source), *round_int4(source, moments))
    lost = relative_error(source, *whole[:2])
    monkeypatch.setattr(rounding, "_BLOCK_ELEMENTS", 5 * 96)
    blocks = (*round_int8(source), *round_int4(source, moments))
    assert all(torch.equal(a, b) for a, b in zip(whole, blocks, strict=True))
    assert relative_error(source, *blocks[:2]) == pytest.approx(lost)


def test_relative_error_is_the_share_of_the_norm() -> None:
    source = torch.tensor([[3.0, 4.0]])
    assert relative_error(source, torch.tensor([[3, 3]], dtype=torch.int8), torch.ones(1, 1)) == (
        pytest.approx(0.2)
    )
    zero = torch.zeros(1, 2, dtype=torch.int8)
    assert relative_error(torch.zeros(1, 2), zero, torch.ones(1, 1)) == 0.0
