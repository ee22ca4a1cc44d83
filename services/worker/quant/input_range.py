"""One scale and zero point for all inputs of a product, from what calibration saw.

``q = round(x / scale + zero_point)``, cut off at -128 and 127. The model multiplies by the
reciprocal of the scale in its own type, so a reciprocal is chosen that bfloat16 holds exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LOWEST, _HIGHEST = -128, 127
_LEVELS = _HIGHEST - _LOWEST
# About 16 bins to a level, so that what lies inside a bin rounds alike.
_NUM_BINS = 8192
_FIRST_LIMIT = 1.0
# Shares of the lowest and of the highest value that a range may end at.
_SHARES = tuple(step / 20 for step in range(20, 5, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """How inputs are quantized."""

    scale: float
    """A float32 whose reciprocal, rounded to bfloat16, is the one that was chosen."""
    zero_point: int


class Histogram:
    """Counts of all values seen, in bins from -limit to limit; the limit doubles when it must."""

    def __init__(self) -> None:
        self._limit = _FIRST_LIMIT
        self._counts = torch.zeros(_NUM_BINS, dtype=torch.float64)
        self._low = self._high = 0.0

    def add(self, values: Tensor) -> None:
        """Count values of any shape and float type."""
        if not values.numel():
            return
        low, high = (float(end) for end in values.aminmax())
        self._low, self._high = min(self._low, low), max(self._high, high)
        while max(-self._low, self._high) > self._limit:
            self._double()
        limit = self._limit
        counts = torch.histc(values.float(), _NUM_BINS, -limit, limit)
        self._counts += counts

    def _double(self) -> None:
        """Halve the resolution: two bins become one, and as many empty ones lie around them."""
        quarter = _NUM_BINS // 4
        merged = self._counts.view(-1, 2).sum(1)
        self._counts = torch.nn.functional.pad(merged, (quarter, quarter))
        self._limit *= 2

    def best_range(self) -> InputRange:
        """The range with the least mean square error, values that it cuts off included."""
        width = 2 * self._limit / _NUM_BINS
        centers = torch.arange(_NUM_BINS, dtype=torch.float64) * width + (width / 2 - self._limit)
        seen = self._counts > 0
        centers, counts = centers[seen], self._counts[seen]
        best, least = InputRange(scale=1.0, zero_point=0), float("inf")
        for candidate in self._candidates():
            levels = (centers / candidate.scale + candidate.zero_point).round_()
            levels.clamp_(_LOWEST, _HIGHEST).sub_(candidate.zero_point)
            error = float(counts @ (levels * candidate.scale - centers).square_())
            if error < least:
                best, least = candidate, error
        return best

    def _candidates(self) -> list[InputRange]:
        if self._low == self._high == 0.0:
            return []  # nothing but zeros: any scale will do
        lows = [self._low * share for share in _SHARES] if self._low < 0.0 else [0.0]
        highs = [self._high * share for share in _SHARES] if self._high > 0.0 else [0.0]
        return [_covering(low, high) for low in lows for high in highs]


def _covering(low: float, high: float) -> InputRange:
    """The finest range that covers `low` <= 0 <= `high`."""
    reciprocal = _round_down(_LEVELS / (high - low))
    zero_point = round(_LOWEST - low * reciprocal)
    scale = float(torch.tensor(1.0 / reciprocal, dtype=torch.float32))
    return InputRange(scale=scale, zero_point=min(max(zero_point, _LOWEST), _HIGHEST))


def _round_down(value: float) -> float:
    """The largest bfloat16 that is not above a positive value."""
    rounded = torch.tensor(value, dtype=torch.float64).to(torch.bfloat16)
    if float(rounded) > value:
        rounded = (rounded.view(torch.int16) - 1).view(torch.bfloat16)
    return float(rounded)
