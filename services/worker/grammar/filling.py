"""Makes the masks of a step: at each row, and behind each of its drafts.

Usual masks take microseconds, and are made one after the other faster than threads are woken. Where
those of a step took long, the next ones are made by several: the engine leaves the interpreter to
others while it works, and no two rows share anything that changes. Behind a draft that its grammar
forbids nothing is masked: what is sampled there is never kept.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from services.worker.grammar.row import RowConstraint, StuckError, Words, allows

_LONG_NS: Final = 4_000_000
_MAX_THREADS: Final = 8
# Threads of a step's products need the others; with less than two of our own there is no gain.
_CPUS_PER_THREAD: Final = 4


@dataclass(slots=True, eq=False)
class RowMasks:
    """The masks of one row in a step, to be made."""

    constraint: RowConstraint
    words: Words
    """[1 + drafts, W]"""
    address: int
    """Of the words in memory."""
    drafts: list[int]
    is_masked: list[bool] = field(init=False)
    """[1 + drafts] where there is one. Behind a draft that is not allowed none is needed."""
    duration_ns: int = 0
    error: StuckError | None = None
    """Why the row cannot go on."""

    def __post_init__(self) -> None:
        """Nothing is made yet."""
        self.is_masked = [False] * len(self.words)


class MaskFiller:
    """Fills masks, with threads of its own where that pays. One thread uses it."""

    def __init__(self, num_threads: int | None = None) -> None:
        """By default as many threads as the processors of this process allow."""
        if num_threads is None:
            num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _CPUS_PER_THREAD)
        self._num_threads = num_threads
        self._threads: ThreadPoolExecutor | None = None
        self.is_long = False
        """Whether the masks of the last step took long."""

    def fill(self, rows: Sequence[RowMasks]) -> None:
        """Make the masks of some rows."""
        count = min(self._num_threads, len(rows))
        if self.is_long and count > 1:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks")
            # Neighbours may be alike in what they cost: deal them out.
            list(self._threads.map(_fill_all, [rows[i::count] for i in range(count)]))
        else:
            _fill_all(rows)
        self.is_long = sum(row.duration_ns for row in rows) > _LONG_NS


def _fill_all(rows: Sequence[RowMasks]) -> None:
    for row in rows:
        started = time.perf_counter_ns()
        try:
            _fill(row)
        except StuckError as error:
            row.error = error
            row.is_masked = [False] * len(row.words)
        row.duration_ns = time.perf_counter_ns() - started


def _fill(row: RowMasks) -> None:
    constraint, drafts = row.constraint, row.drafts
    if not drafts:
        row.is_masked[0] = constraint.fill(row.words[0], row.address)
        return
    mark = constraint.mark()
    for place, words in enumerate(row.words):
        is_masked = constraint.fill(words, row.address + place * row.words.strides[0])
        row.is_masked[place] = is_masked
        if place == len(drafts):
            break
        if is_masked and not allows(words, drafts[place]):
            break
        constraint.accept(drafts[place])
    constraint.back_to(mark)
