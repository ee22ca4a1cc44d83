"""Sizes of captured decode steps, and which of them a step takes.

A decode step has the same number of rows for each sequence: its last token and its drafts. Sizes
count rows, that of a step is rounded up to the next, and what is missing is padding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.worker.plan import Ints
from shared.errors import ConfigError

_SMALL = (1, 2, 4)
_STEP, _LARGE, _LARGE_STEP = 8, 256, 16
_LARGEST = 512
_FLAG = "--cudagraph-capture-sizes"


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


class StepBounds(Protocol):
    """What bounds a step."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences."""
        ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts of a sequence."""
        ...


def choose_sizes(
    limits: StepBounds,
    *,
    asked: Sequence[int] | None = None,
    largest: int | None = None,
    multiple: int = 1,
) -> CaptureSizes | None:
    """The sizes to capture; None where nobody asked for any and steps are too small for one.

    Args:
        limits: Bounds of a step.
        asked: Sizes by the user; None for those of vLLM.
        largest: Bound of the sizes by the user.
        multiple: Every size must be one of it: ranks that share the tokens of a step.

    Raises:
        ConfigError: No size is left of those asked for.
    """
    rows = 1 + limits.num_speculative_tokens
    all_rows = limits.max_num_seqs * rows
    bound = min(all_rows, limits.max_num_batched_tokens)
    if largest is not None:
        bound = min(bound, largest)
    elif asked is None:
        bound = min(bound, _LARGEST)
    if asked is None:
        step = math.lcm(rows, multiple)
        chosen = {-(-size // step) * step for size in _default_sizes(bound)}
    else:
        chosen = {size for size in asked if size % multiple == 0}
    # Rounded up to whole sequences, then cut: a size that no step can have is none.
    whole = {-(-size // rows) * rows for size in chosen}
    is_right = {size: rows <= size <= bound and size % multiple == 0 for size in whole}
    sizes = tuple(sorted(size for size, holds in is_right.items() if holds))
    if not sizes and asked is None and largest is None:
        return None
    if not sizes:
        listed = "the default" if asked is None else ", ".join(map(str, asked))
        raise ConfigError(
            f"{_FLAG}: of {listed} none is left: a size is at most {bound}, a multiple of "
            f"{multiple} and, rounded up, of {rows}"
        )
    return CaptureSizes(rows_per_seq=rows, sizes=sizes)


def _default_sizes(bound: int) -> list[int]:
    """The list of vLLM, and the bound itself: a full step is the last that should be slow."""
    small = [*_SMALL, *range(_STEP, _LARGE + 1, _STEP)]
    large = range(_LARGE + _LARGE_STEP, bound + 1, _LARGE_STEP)
    return [*small, *large, bound]
