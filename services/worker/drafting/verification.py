"""Which drafts are kept: those that the ordinary sampler would have produced itself.

A row with D drafts has 1 + D logits, that of its last known token and one behind each draft. The
target is sampled from each of them, under the settings that hold if the drafts before it are kept;
the run is the longest prefix of targets that equals the drafts, and the target behind it. So every
token of a run is what would have been sampled without drafts, and its distribution is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.contract import ActiveRows
from services.worker.plan import Ints
from services.worker.rows import RowTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """What was decided for S rows."""

    tokens: Ints
    """[S, 1 + D] targets."""
    accepted: Ints
    """[S] drafts that the run of a row begins with."""
    is_broken: NDArray[np.bool_]
    """[S] whether numbers behind the run are not finite."""

    @property
    def lengths(self) -> Ints:
        """[S] tokens in each run; none where the numbers are broken."""
        return np.where(self.is_broken, 0, self.accepted + 1)


class Verification:
    """The logits of a step by row and draft: N of them for S rows."""

    def __init__(self, table: RowTable, active: ActiveRows, entries: Ints) -> None:
        """`entries` are the places of the S rows among the active ones."""
        assert active.num_drafts is not None
        self._table = table
        self.entries = entries
        self.rows = active.rows[entries]
        self._num_drafts = active.num_drafts[entries]
        counts = self._num_drafts + 1
        ends = np.cumsum(counts)
        self.owners = np.repeat(np.arange(len(entries)), counts)
        """[N] place of the row among the S."""
        self.offsets = np.arange(len(self.owners)) - np.repeat(ends - counts, counts)
        """[N] drafts before it."""
        self._num_known = table.num_tokens[self.rows]

    @property
    def rows_of_logits(self) -> Ints:
        """[N] row."""
        return self.rows[self.owners]

    @property
    def num_outputs(self) -> Ints:
        """[N] output tokens before it, drafts included."""
        num_outputs = self._num_known - self._table.num_prompt[self.rows]
        return num_outputs[self.owners] + self.offsets

    def drafts_before(self, place: int) -> Ints:
        """The drafts that the logits at `place` follow."""
        owner = self.owners[place]
        start = self._num_known[owner]
        end = start + self.offsets[place]
        return self._table.tokens[self.rows[owner], start:end].astype(np.int64)

    def judge(self, targets: Ints, is_finite: NDArray[np.bool_]) -> Runs:
        """Compare N targets with the drafts."""
        shape = (len(self.rows), 1 + int(self._num_drafts.max(initial=0)))
        tokens = np.zeros(shape, np.int64)
        tokens[self.owners, self.offsets] = targets
        # Behind the drafts of a row stand older tokens, which are compared but do not count.
        following = self._table.tokens[
            self.rows_of_logits, self._num_known[self.owners] + self.offsets
        ]
        is_kept = np.zeros(shape, np.bool_)
        is_draft = self.offsets < self._num_drafts[self.owners]
        is_kept[self.owners, self.offsets] = (targets == following) & is_draft
        accepted = is_kept.argmin(axis=1)  # the last column of a row is never kept
        is_broken = np.zeros(len(self.rows), np.bool_)
        if not is_finite.all():
            is_used = self.offsets <= accepted[self.owners]
            is_broken[self.owners[is_used & ~is_finite]] = True
        return Runs(tokens=tokens, accepted=accepted, is_broken=is_broken)

    def kept_places(self, kept: Ints, num_logprobs: Ints) -> Ints:
        """Places among the N whose targets were kept by rows that asked for logprobs.

        Args:
            kept: [S] tokens kept of each run.
            num_logprobs: [S] alternatives asked for, -1 for no logprobs.
        """
        is_asked = (num_logprobs >= 0)[self.owners]
        return (is_asked & (self.offsets < kept[self.owners])).nonzero()[0]
