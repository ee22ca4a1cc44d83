"""One scale for all inputs: what it covers, and that the model can hold it."""

import pytest
import torch
from torch import Tensor

from services.worker.quant.input_range import Histogram, InputRange


def range_of(*values: Tensor) -> InputRange:
    histogram = Histogram()
    for part in values:
        histogram.add(part)
    return histogram.best_range()


def rounded(values: Tensor, chosen: InputRange) -> Tensor:
    levels = (values / chosen.scale + chosen.zero_point).round().clamp(-128, 127)
    return (levels - chosen.zero_point) * chosen.scale


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-3, 1.0, 37.0])
def test_the_reciprocal_is_exact_in_bfloat16(size: float) -> None:
    chosen = range_of(noise(1000) * size)
    reciprocal = torch.tensor(1.0 / chosen.scale).to(torch.bfloat16)
    # The reciprocal that the model multiplies by gives the scale back to float32's last digits.
    assert 1.0 / float(reciprocal) == pytest.approx(chosen.scale, rel=2**-23)


def test_values_of_one_sign_have_all_levels() -> None:
    values = torch.linspace(0, 10, 5001)
    chosen = range_of(values)
    assert chosen.zero_point == -128
    assert 10 / 255 <= chosen.scale <= 10 / 255 * (1 + 2**-7)  # rounded to bfloat16, upwards
    assert range_of(-values).zero_point == 127


def test_evenly_spread_values_lose_at_most_half_a_step() -> None:
    values = torch.linspace(-3, 9, 5001)
    chosen = range_of(values)
    # A step more at the ends: the zero point is rounded too.
    assert float((rounded(values, chosen) - values).abs().max()) <= chosen.scale


def test_rare_outliers_are_cut_off_when_that_costs_less() -> None:
    values = torch.cat((noise(100_000), torch.tensor([12.0])))
    chosen = range_of(values)
    assert chosen.scale < (12 - float(values.min())) / 255 * 0.95
    covering = InputRange(scale=(12 - float(values.min())) / 255, zero_point=-48)
    lost = float((rounded(values, chosen) - values).square().sum())
    assert lost < float((rounded(values, covering) - values).square().sum())


def test_frequent_large_values_are_not_cut_off() -> None:
    chosen = range_of(torch.cat((noise(1000), torch.full((100,), 40.0))))
    assert (127 - chosen.zero_point) * chosen.scale >= 39.5


def test_zero_is_exact() -> None:
    chosen = range_of(noise(1000) + 3.0)
    assert float(rounded(torch.zeros(1), chosen)) == 0.0


def test_parts_count_as_one_whole_whatever_their_order() -> None:
    parts = [noise(500, seed) * 3**seed for seed in range(5)]
    whole = range_of(torch.cat(parts))
    assert range_of(*parts) == whole
    assert range_of(*reversed(parts)) == whole


def test_values_keep_their_place_when_the_limit_doubles() -> None:
    early, late = torch.full((64,), 0.3), torch.full((1,), 300.0)
    histogram = Histogram()
    histogram.add(early)
    histogram.add(late)
    chosen = histogram.best_range()
    # 64 values of 0.3 do not outweigh one of 300: the range reaches out for it.
    assert (127 - chosen.zero_point) * chosen.scale >= 285


def test_zeros_and_nothing_have_a_range() -> None:
    assert range_of() == range_of(torch.zeros(5)) == InputRange(scale=1.0, zero_point=0)
    assert range_of(torch.empty(0)).scale == 1.0


def test_bfloat16_values_are_counted() -> None:
    values = noise(1000).to(torch.bfloat16)
    assert range_of(values) == range_of(values.float())
