"""Proposes the drafts of the next step, once this step's tokens are in the rows.

The first pass of the MTP layer runs over every token of every step, prompt chunks and verified
drafts alike, so that its caches have no gaps; behind rejected drafts it writes what the next step
writes again. Drafts are the likeliest tokens, the lowest id among equals: whatever they are, they
decide about speed alone.
"""

from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from services.worker.batch import Batch
from services.worker.contract import ActiveRows
from services.worker.drafting.passes import PassBuilder
from services.worker.lockstep import OwnPace, Pace, limit_drafts
from services.worker.model.metadata import StepMetadata
from services.worker.plan import Ints
from services.worker.rows import RUNNING, RowTable
from services.worker.rowwise import argmax_rows
from services.worker.staging import StagingBuffer
from services.worker.tokens import OwnTokens, TokenSource

CachesT = TypeVar("CachesT")
CachesT_contra = TypeVar("CachesT_contra", contravariant=True)


class Drafter(Protocol[CachesT_contra]):
    """What the proposer needs of a model."""

    def draft(
        self, token_ids: Tensor, hidden: Tensor, step: StepMetadata, caches: CachesT_contra
    ) -> Tensor:
        """[T] tokens behind the step's positions and [T, E] states there to [T, E] states."""
        ...

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] states to [S, V] float32 logits."""
        ...


class Proposer(Generic[CachesT]):
    """Owns the buffers of drafting. One thread uses it."""

    def __init__(
        self,
        drafter: Drafter[CachesT] | None,
        caches: CachesT,
        table: RowTable,
        *,
        num_known_ids: int,
        device: torch.device,
        row_multiple: int,
        tokens: TokenSource | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Reserve buffers.

        Args:
            drafter: The MTP layer; None on a rank without it, which is told the drafts.
            caches: Its caches.
            table: The rows.
            num_known_ids: Bounds what can be drafted.
            device: Where the model is.
            row_multiple: Passes are padded to a multiple of it.
            tokens: How drafts are told; by default they are this rank's.
            pace: What other replicas do meanwhile; by default there are none.
        """
        limits = table.capacity
        self._tokens: TokenSource = tokens or OwnTokens()
        self._pace: Pace = pace or OwnPace()
        self._drafter = drafter
        self._caches = caches
        self._table = table
        self._num_known_ids = num_known_ids
        self._multiple = row_multiple
        self._passes = PassBuilder(table, device, row_multiple=row_multiple)
        num_tokens = limits.max_num_batched_tokens + row_multiple
        self._next_ids = StagingBuffer((num_tokens,), torch.int64, device)
        self._places = StagingBuffer((limits.max_num_seqs + row_multiple,), torch.int64, device)

    @torch.inference_mode()
    def propose(self, hidden: Tensor, batch: Batch, active: ActiveRows, accepted: Ints) -> None:
        """Write the drafts of the rows that go on into the table.

        Args:
            hidden: [T, E] states of the step, of the main model.
            batch: The step.
            active: Its rows.
            accepted: [A] drafts that each row kept.
        """
        entries, counts = limit_drafts(*self._wanted(active), self._pace)
        sizes = _alive(counts)
        drafts = np.zeros(sum(sizes), np.int64)
        if self._drafter is not None:
            states = self._first_pass(self._drafter, hidden, batch)
            if len(entries):
                states = states[self._last_places(batch, active, accepted, entries)]
                drafts = self._draft(self._drafter, states, active.rows[entries], counts)
        if len(entries):
            self._store(active.rows[entries], counts, sizes, self._tokens.share(drafts))

    def _first_pass(self, drafter: Drafter[CachesT], hidden: Tensor, batch: Batch) -> Tensor:
        step = self._pace.in_draft(batch.metadata)
        return drafter.draft(self._shifted(batch), hidden, step, self._caches)

    def _draft(self, drafter: Drafter[CachesT], states: Tensor, rows: Ints, counts: Ints) -> Ints:
        """The drafts of all passes, one pass behind the other."""
        ids = self._likeliest(drafter, states, len(rows))
        drafts = [ids]
        for each in self._passes.build(rows, counts):
            step = self._pace.in_draft(each.metadata)
            ids, states = self._cut(ids, states, each.count, step.num_tokens)
            states = drafter.draft(ids, states, step, self._caches)
            ids = self._likeliest(drafter, states, each.count)
            drafts.append(ids)
        # Read back once, at the end: until then no pass waits for the host.
        return torch.cat(drafts).cpu().numpy()

    def _shifted(self, batch: Batch) -> Tensor:
        """[T] the token behind each position; behind a rejected draft it does not matter."""
        count, padded = len(batch.token_rows), batch.metadata.num_tokens
        ids = self._table.tokens[batch.token_rows, batch.token_positions + 1]
        if batch.token_places is None:
            self._next_ids.array[:count] = ids
            self._next_ids.array[count:padded] = 0
        else:
            self._next_ids.array[:padded] = 0
            self._next_ids.array[batch.token_places] = ids
        return self._next_ids.send(padded)

    def _wanted(self, active: ActiveRows) -> tuple[Ints, Ints]:
        """Places of the rows that get drafts, and how many, the largest numbers first."""
        table = self._table
        is_going_on = active.is_sampling & (table.state[active.rows] == RUNNING)
        entries = is_going_on.nonzero()[0]
        rows = active.rows[entries]
        # Verifying D drafts brings up to D + 1 tokens; all but the last have been written here.
        counts = np.minimum(table.room(rows) - 1, table.capacity.num_speculative_tokens)
        np.minimum(counts, table.covered(rows) - table.num_tokens[rows] + 2, out=counts)
        order = np.argsort(-counts, kind="stable")
        order = order[: np.count_nonzero(counts > 0)]
        return entries[order], counts[order]

    def _last_places(
        self, batch: Batch, active: ActiveRows, accepted: Ints, entries: Ints
    ) -> Tensor:
        """[R, padded] places in the step of the last token of each row that stays."""
        assert active.num_drafts is not None
        last = batch.row_ends - 1 - (active.num_drafts - accepted)
        count = len(entries)
        padded = count + -count % self._multiple
        self._places.array[:count] = last[entries]
        self._places.array[count:padded] = 0
        return self._places.send(padded)

    def _likeliest(self, drafter: Drafter[CachesT], states: Tensor, count: int) -> Tensor:
        """[R] the likeliest known token behind each of the first `count` states."""
        logits = drafter.compute_draft_logits(states)
        return argmax_rows(logits[:count, : self._num_known_ids])[1]

    def _cut(self, ids: Tensor, states: Tensor, count: int, padded: int) -> tuple[Tensor, Tensor]:
        """The first `count` rows and padding."""
        ids = ids[:count]
        if padded > count:
            ids = torch.cat((ids, ids.new_zeros(padded - count)))
        return ids, states[:padded]

    def _store(self, rows: Ints, counts: Ints, sizes: list[int], drafts: Ints) -> None:
        table = self._table
        first, start = table.num_tokens[rows], 0
        for index, count in enumerate(sizes):
            table.tokens[rows[:count], first[:count] + index] = drafts[start : start + count]
            start += count
        table.num_drafts[rows] = counts


def _alive(counts: Ints) -> list[int]:
    """Rows in each pass, of rows that want so many drafts."""
    passes = np.arange(counts.max(initial=0))[:, None]
    alive: list[int] = (counts > passes).sum(axis=1).tolist()
    return alive
