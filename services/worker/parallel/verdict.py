"""Whose fault it is when a world stands still: from what each rank last said about itself.

Pure: positions and ages in, names out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services.worker.parallel.progress import Position

SILENT_S: Final = 2.0
"""Silence after which a rank counts as gone when a culprit is looked for; four pulses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What is known of one rank."""

    position: Position
    age_s: float
    """Time since it said so."""

    @property
    def seconds_in_step(self) -> float:
        """Time in its present step, as far as is known; 0 when it was idle."""
        seconds = self.position.seconds
        return seconds + self.age_s if seconds else 0.0


def find_stall(ranks: Mapping[int, Heard], limit_s: float) -> str:
    """Why the world does not move, naming ranks and steps; empty while it does."""
    if all(one.seconds_in_step <= limit_s and one.age_s <= limit_s for one in ranks.values()):
        return ""
    named = "; ".join(f"rank {rank} {_describe(ranks[rank])}" for rank in _culprits(ranks))
    return f"no progress for over {limit_s:g} s: {named}"


def _culprits(ranks: Mapping[int, Heard]) -> list[int]:
    """Those who are waited for: the silent, those behind, those who do not wait themselves."""
    silent = [rank for rank, one in ranks.items() if one.age_s > SILENT_S]
    if silent:
        return silent
    latest = max(one.position.step for one in ranks.values())
    behind = [rank for rank, one in ranks.items() if one.position.step < latest]
    late = behind or [rank for rank, one in ranks.items() if one.position.seconds]
    computing = [rank for rank in late if not ranks[rank].position.meeting]
    if computing:
        return computing
    fewest = min(ranks[rank].position.num_meetings for rank in late)
    return [rank for rank in late if ranks[rank].position.num_meetings == fewest]


def _describe(one: Heard) -> str:
    silence = f"has been silent for {one.age_s:.1f} s, last " if one.age_s > SILENT_S else "is "
    return f"{silence}{one.position}"
