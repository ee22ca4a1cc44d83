"""Sizes of captured decode steps, and which of them a step takes.

A decode step has the same number of rows for each sequence: its last token and its drafts. Sizes
count rows, that of a step is rounded up to the next, and what is missing is padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.plan import Ints
from services.worker.step_sizes import StepBounds, decode_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSizes:
    """Ascending sizes, all of whole sequences."""

    rows_per_seq: int
    sizes: tuple[int, ...]

    @property
    def num_seqs(self) -> tuple[int, ...]:
        """Sequences of each size."""
        return tuple(size // self.rows_per_seq for size in self.sizes)

    def fitting(self, num_scheduled: Ints) -> int | None:
        """Sequences in the smallest captured step that holds a step; None for none.

        Args:
            num_scheduled: [A] tokens of each sequence. Rows past them are dead in a captured step.
        """
        if num_scheduled.max() > self.rows_per_seq:
            return None
        needed = len(num_scheduled) * self.rows_per_seq
        place = int(np.searchsorted(self.sizes, needed))
        return None if place == len(self.sizes) else self.sizes[place] // self.rows_per_seq


def choose_sizes(
    limits: StepBounds,
    *,
    asked: Sequence[int] | None = None,
    largest: int | None = None,
    multiple: int = 1,
) -> CaptureSizes | None:
    """The sizes to capture, as `decode_sizes` has them; None for none.

    Raises:
        ConfigError: No size is left of those asked for.
    """
    sizes = decode_sizes(limits, asked=asked, largest=largest, multiple=multiple)
    rows = 1 + limits.num_speculative_tokens
    return CaptureSizes(rows_per_seq=rows, sizes=sizes) if sizes else None
