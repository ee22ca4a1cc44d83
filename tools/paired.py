"""Compares two models on the same prompts, one yes or no for each prompt and model."""

import math
from dataclasses import dataclass
from typing import Any

_Z = 1.96
"""Normal quantile of a 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Prompts that both models answered, by who was right."""

    both: int
    lost: int
    """Right before, wrong now."""
    won: int
    neither: int

    @property
    def count(self) -> int:
        """All prompts."""
        return self.both + self.lost + self.won + self.neither

    @property
    def points(self) -> float:
        """What the second gains over the first, in points of 100."""
        return 100 * (self.won - self.lost) / self.count

    def interval(self) -> tuple[float, float]:
        """95 % interval of `points` (Agresti and Min: half a prompt more in each of the cells)."""
        count, change = self.count + 2, self.won - self.lost
        spread = math.sqrt(self.won + self.lost + 1 - change**2 / count) / count
        middle = change / count
        return 100 * (middle - _Z * spread), 100 * (middle + _Z * spread)

    def p_value(self) -> float:
        """Exact McNemar test: how likely so uneven a split is if neither model is better."""
        total, few = self.lost + self.won, min(self.lost, self.won)
        tail = sum(math.comb(total, k) for k in range(few + 1)) / 2**total
        return min(1.0, 2 * tail)

    def as_dict(self) -> dict[str, Any]:
        """What a report shows."""
        low, high = self.interval()
        return {
            "prompts": self.count,
            "before": round((self.both + self.lost) / self.count, 4),
            "after": round((self.both + self.won) / self.count, 4),
            "points": round(self.points, 2),
            "interval": [round(low, 2), round(high, 2)],
            "lost": self.lost,
            "won": self.won,
            "p": round(self.p_value(), 4),
        }


def pair(before: dict[int, bool], after: dict[int, bool]) -> Pairs:
    """Counts prompts by their numbers; both models must have answered the same ones."""
    assert before.keys() == after.keys()
    cells = [(before[number], after[number]) for number in before]
    return Pairs(
        both=cells.count((True, True)),
        lost=cells.count((True, False)),
        won=cells.count((False, True)),
        neither=cells.count((False, False)),
    )
