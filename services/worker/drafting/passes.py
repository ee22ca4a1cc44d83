"""Where the later passes of the MTP layer stand: one token per row, a position further each time.

The first pass runs over the step itself. Each later one extends what the one before it wrote, from
the last position that is sure to stay. Rows that want fewer drafts leave earlier; they are sorted,
so that those that go on are always the first ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.model.metadata import StepMetadata
from services.worker.plan import Ints
from services.worker.rows import RowTable
from services.worker.staging import StagingBuffer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftPass:
    """One pass; `count` of its rows are real, the others padding."""

    count: int
    metadata: StepMetadata


class PassBuilder:
    """Owns the buffers of all later passes of a step. One thread uses it."""

    def __init__(self, table: RowTable, device: torch.device, *, row_multiple: int) -> None:
        """Passes are padded to a multiple of `row_multiple` rows, as steps are."""
        limits = table.capacity
        self._table = table
        self._device = device
        self._multiple = row_multiple
        num_seqs = limits.max_num_seqs
        # All passes lie behind each other: none is written while a device may still read another.
        most = max(1, limits.num_speculative_tokens - 1) * num_seqs
        self._positions = StagingBuffer((most,), torch.int64, device)
        self._slots = StagingBuffer((most,), torch.int32, device)
        self._seq_lens = StagingBuffer((most,), torch.int32, device)
        self._tables = StagingBuffer((num_seqs * limits.max_blocks_per_row,), torch.int32, device)
        self._ramp = torch.arange(1, num_seqs + 1, dtype=torch.int32, device=device)

    def build(self, rows: Ints, counts: Ints) -> list[DraftPass]:
        """The later passes.

        Args:
            rows: [R] rows, those with the most drafts first.
            counts: [R] drafts of each, descending.
        """
        num_passes, num_rows = int(counts[0]) - 1, len(rows)
        if num_passes < 1:
            return []
        size = self._table.capacity.block_size
        # The last token is not computed yet; the one before it was the last of the first pass.
        first = self._table.num_tokens[rows] - 1
        positions = first + np.arange(num_passes)[:, None]
        # Positions past the drafts of a row are written here and read by no pass.
        blocks = np.minimum(positions // size, self._table.block_table.shape[1] - 1)
        slots = self._table.block_table[rows, blocks] * size + positions % size
        total = num_passes * num_rows
        self._positions.array[:total] = positions.reshape(-1)
        self._slots.array[:total] = slots.reshape(-1)
        self._seq_lens.array[:total] = positions.reshape(-1) + 1
        shape = (num_passes, num_rows)
        at, to = self._positions.send(total).view(shape), self._slots.send(total).view(shape)
        lens = self._seq_lens.send(total).view(shape)
        width = int((first + counts - 2).max()) // size + 1
        table = self._send_tables(rows, width)
        alive = (counts > np.arange(1, num_passes + 1)[:, None]).sum(axis=1).tolist()
        return [
            self._one(
                count, at[index, :count], to[index, :count], lens[index, :count], table[:count]
            )
            for index, count in enumerate(alive)
        ]

    def _send_tables(self, rows: Ints, width: int) -> Tensor:
        used = len(rows) * width
        self._tables.array[:used] = self._table.block_table[rows, :width].reshape(-1)
        return self._tables.send(used).view(len(rows), width)

    def _one(
        self, count: int, positions: Tensor, slots: Tensor, seq_lens: Tensor, table: Tensor
    ) -> DraftPass:
        cum_query_lens = self._ramp[:count]
        padding = -count % self._multiple
        if padding:
            # One more sequence of length 0 that writes into the scratch block, as in a step.
            ramp = torch.arange(padding, dtype=slots.dtype, device=self._device)
            positions = torch.cat((positions, torch.zeros_like(ramp, dtype=positions.dtype)))
            slots = torch.cat((slots, ramp))
            seq_lens = torch.cat((seq_lens, torch.zeros_like(seq_lens[:1])))
            cum_query_lens = torch.cat((cum_query_lens, cum_query_lens[-1:] + padding))
            table = torch.cat((table, torch.zeros_like(table[:1])))
        metadata = StepMetadata(
            num_tokens=count + padding,
            positions=positions,
            slot_mapping=slots,
            cum_query_lens=cum_query_lens,
            seq_lens=seq_lens,
            block_table=table,
        )
        return DraftPass(count=count, metadata=metadata)
