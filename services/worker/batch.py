"""Turns the rows of a step into the tensors that the model takes.

One flattened step: prefill chunks and decodes stand behind each other, T tokens of R sequences. All
buffers are allocated once and rewritten in place, so their addresses stay; the work per step is a
fixed number of vector operations, however many tokens there are. A decode step that fits a captured
size has that size and the form that `graphs.frames` gives it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.contract import ActiveRows
from services.worker.graphs.frames import Frames
from services.worker.graphs.sizes import CaptureSizes
from services.worker.model.metadata import StepMetadata
from services.worker.plan import Ints
from services.worker.rows import RowTable
from services.worker.staging import StagingBuffer, StepStaging


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step for the model."""

    token_ids: Tensor
    """[T] int64, padding included."""
    metadata: StepMetadata
    sampling_entries: Ints
    """[S] places in the active rows that get a new token."""
    num_sampled: int
    """Logits that are sampled: one for each of the entries and one for each draft of theirs."""
    sampling_positions: Tensor | None
    """[S, padded] int64, places of their last tokens in the step; None when they are all of it.
    With drafts a row has several: that of its last known token and those of its drafts."""
    token_rows: Ints
    """[T] row of every token, padding left out."""
    token_positions: Ints
    """[T] position of every token in its row, padding left out."""
    token_places: Ints | None
    """[T] place of each of those in the step; None: they stand behind each other."""
    row_ends: Ints
    """[A] place behind the last token of each active row."""


class BatchBuilder:
    """Owns the buffers. One thread uses it."""

    def __init__(
        self,
        table: RowTable,
        device: torch.device,
        *,
        row_multiple: int,
        sizes: CaptureSizes | None = None,
    ) -> None:
        """Steps are padded to a multiple of `row_multiple` tokens, or to one of `sizes`.

        Padding tokens are one more sequence of length 0 that writes into the scratch block.
        """
        limits = table.capacity
        self._table = table
        self._multiple = row_multiple
        num_tokens = limits.max_num_batched_tokens + row_multiple
        num_seqs = limits.max_num_seqs + 1
        staging = StepStaging(limits, num_tokens, num_seqs, device)
        self._token_ids, self._positions = staging.token_ids, staging.positions
        self._slots, self._tables = staging.slots, staging.tables
        self._cum_query_lens, self._seq_lens = staging.cum_query_lens, staging.seq_lens
        most_sampled = num_seqs * (1 + limits.num_speculative_tokens) + row_multiple
        self._sampled = StagingBuffer((most_sampled,), torch.int64, device)
        self._ramp = np.arange(num_tokens)
        self.frames = None if sizes is None else Frames(table, staging, sizes)

    def build(self, active: ActiveRows, captured_num_seqs: int | None = None) -> Batch:
        """Write one step; its tensors are valid until the next one.

        Args:
            active: What is computed.
            captured_num_seqs: Sequences of the captured step that it has to be, 0 for none; None:
                the smallest that holds it, if there is one.
        """
        if self.frames is not None:
            num_seqs = captured_num_seqs
            if num_seqs is None:
                num_seqs = self.frames.fitting(active)
            if num_seqs:
                return self._build_frame(self.frames, active, num_seqs)
        num_tokens = active.num_tokens
        padded = -(-num_tokens // self._multiple) * self._multiple
        num_seqs = len(active.rows) + (padded > num_tokens)
        rows, positions = self._spread(active, num_tokens)
        self._fill_tokens(rows, positions, num_tokens, padded)
        self._fill_lengths(active, padded)
        metadata = StepMetadata(
            num_tokens=padded,
            positions=self._positions.send(padded),
            slot_mapping=self._slots.send(padded),
            cum_query_lens=self._cum_query_lens.send(num_seqs),
            seq_lens=self._seq_lens.send(num_seqs),
            block_table=self._fill_block_tables(active, num_seqs),
        )
        row_ends = np.cumsum(active.num_scheduled)
        entries, num_sampled, sampled = self._choose_sampled(active, row_ends, padded)
        return Batch(
            token_ids=self._token_ids.send(padded),
            metadata=metadata,
            sampling_entries=entries,
            num_sampled=num_sampled,
            sampling_positions=sampled,
            token_rows=rows,
            token_positions=positions,
            token_places=None,
            row_ends=row_ends,
        )

    def _build_frame(self, frames: Frames, active: ActiveRows, num_seqs: int) -> Batch:
        live = frames.write(active, num_seqs)
        frame = frames.send(num_seqs)
        entries, num_sampled, sampled = self._choose_sampled(
            active, live.row_ends, frame.metadata.num_tokens
        )
        return Batch(
            token_ids=frame.token_ids,
            metadata=frame.metadata,
            sampling_entries=entries,
            num_sampled=num_sampled,
            sampling_positions=sampled,
            token_rows=live.rows,
            token_positions=live.positions,
            token_places=live.places,
            row_ends=live.row_ends,
        )

    def _spread(self, active: ActiveRows, num_tokens: int) -> tuple[Ints, Ints]:
        """Row and position of every token."""
        if num_tokens == len(active.rows):  # decodes only
            return active.rows, active.num_computed
        counts = active.num_scheduled
        starts = np.cumsum(counts) - counts
        offsets = np.repeat(active.num_computed - starts, counts)
        return np.repeat(active.rows, counts), offsets + self._ramp[:num_tokens]

    def _fill_tokens(self, rows: Ints, positions: Ints, num_tokens: int, padded: int) -> None:
        size = self._table.capacity.block_size
        blocks = self._table.block_table[rows, positions // size]
        self._token_ids.array[:num_tokens] = self._table.tokens[rows, positions]
        self._positions.array[:num_tokens] = positions
        self._slots.array[:num_tokens] = blocks * size + positions % size
        if padded > num_tokens:
            self._token_ids.array[num_tokens:padded] = 0
            self._positions.array[num_tokens:padded] = 0
            # Slots of scratch block 0, one each.
            self._slots.array[num_tokens:padded] = self._ramp[: padded - num_tokens]

    def _fill_lengths(self, active: ActiveRows, padded: int) -> None:
        count = len(active.rows)
        np.cumsum(active.num_scheduled, out=self._cum_query_lens.array[:count])
        self._seq_lens.array[:count] = active.num_computed + active.num_scheduled
        self._cum_query_lens.array[count] = padded
        self._seq_lens.array[count] = 0

    def _fill_block_tables(self, active: ActiveRows, num_seqs: int) -> Tensor:
        """Tables of the active rows, as wide as the longest sequence needs."""
        ends = active.num_computed + active.num_scheduled
        width = -(-int(ends.max()) // self._table.capacity.block_size)
        used = len(active.rows) * width
        self._tables.array[:used] = self._table.block_table[active.rows, :width].reshape(-1)
        self._tables.array[used : num_seqs * width] = 0
        return self._tables.send(num_seqs * width).view(num_seqs, width)

    def _choose_sampled(
        self, active: ActiveRows, row_ends: Ints, padded: int
    ) -> tuple[Ints, int, Tensor | None]:
        """The active rows that sample, their logits, and the places of those in the step."""
        entries = active.is_sampling.nonzero()[0]
        drafts = active.num_drafts
        count = len(entries) if drafts is None else len(entries) + int(drafts.sum())
        if count == padded:
            return entries, count, None
        last = row_ends[entries] - 1
        if drafts is not None:
            last = ends_of_runs(last, drafts[entries] + 1)
        # The head is a matrix product as well: the same padding, with any token of the step.
        wanted = -(-count // self._multiple) * self._multiple
        self._sampled.array[:count] = last
        self._sampled.array[count:wanted] = 0
        return entries, count, self._sampled.send(wanted)


def ends_of_runs(last: Ints, counts: Ints) -> Ints:
    """The numbers ``last - count + 1`` to ``last`` of each run, behind each other."""
    ends = np.cumsum(counts)
    return np.repeat(last + 1 - ends, counts) + np.arange(counts.sum())
