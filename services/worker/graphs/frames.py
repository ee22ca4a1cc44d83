"""Decode steps in the form of a captured one, whatever they hold.

Each sequence has the same number of rows: its last token, its drafts, and dead rows for drafts it
has not. Dead rows compute what nobody reads, and write into the scratch block. Behind the sequences
stand padding ones with no keys. The block table has all its columns, so a step's numbers are those
of its size alone.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.worker.contract import ActiveRows
from services.worker.graphs.sizes import CaptureSizes
from services.worker.model.metadata import StepMetadata
from services.worker.plan import Ints
from services.worker.rows import RowTable
from services.worker.staging import StepStaging


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRows:
    """The rows of a frame that are not dead."""

    rows: Ints
    """[T] row in the table of every token."""
    positions: Ints
    """[T] position of every token in its row."""
    places: Ints | None
    """[T] place of every token in the frame; None: they stand behind each other."""
    row_ends: Ints
    """[A] place behind the last token of each active row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Tensors of one size, the same ones in each step."""

    token_ids: Tensor
    metadata: StepMetadata


class Frames:
    """Writes decode steps into the buffers of all steps. One thread uses it."""

    def __init__(self, table: RowTable, staging: StepStaging, sizes: CaptureSizes) -> None:
        """Steps of the table's rows, at the sizes that are captured."""
        self._table = table
        self._staging = staging
        self.sizes = sizes
        self._per_seq = sizes.rows_per_seq
        self._ramp = np.arange(self._per_seq)
        most = sizes.sizes[-1]
        self._ends = np.arange(self._per_seq, most + 1, self._per_seq)
        # Slots of scratch block 0, each taken by few.
        self._scratch = np.arange(most) % table.capacity.block_size
        self._width = staging.max_blocks

    def fitting(self, active: ActiveRows) -> int | None:
        """Sequences in the frame that holds a step; None for none."""
        return self.sizes.fitting(active.num_scheduled)

    def write(self, active: ActiveRows, num_seqs: int) -> LiveRows:
        """Write a step into a frame of so many sequences."""
        count, per_seq = len(active.rows), self._per_seq
        positions = active.num_computed[:, None] + self._ramp
        is_live = self._ramp < active.num_scheduled[:, None]
        rows = np.broadcast_to(active.rows[:, None], positions.shape)
        self._write_tokens(rows, positions, is_live, num_seqs)
        lens = self._staging.seq_lens.array
        # As if all rows were live: what a live row sees ends with itself in any case.
        lens[:count] = active.num_computed + per_seq
        lens[count:num_seqs] = 0
        self._staging.cum_query_lens.array[:num_seqs] = self._ends[:num_seqs]
        self._write_tables(active.rows, num_seqs)
        starts = self._ends[:count] - per_seq
        row_ends = starts + active.num_scheduled
        if is_live.all():
            return LiveRows(
                rows=rows.ravel(), positions=positions.ravel(), places=None, row_ends=row_ends
            )
        return LiveRows(
            rows=rows[is_live],
            positions=positions[is_live],
            places=is_live.ravel().nonzero()[0],
            row_ends=row_ends,
        )

    def write_nothing(self, num_seqs: int, *, seq_len: int = 0) -> None:
        """Write a frame of padding, whose sequences have so many keys in the scratch block."""
        nobody = np.empty(0, np.int64)
        nothing = ActiveRows(
            entries=nobody,
            rows=nobody,
            num_scheduled=nobody,
            num_computed=nobody,
            is_sampling=np.empty(0, np.bool_),
        )
        self.write(nothing, num_seqs)
        self._staging.seq_lens.array[:num_seqs] = seq_len

    def send(self, num_seqs: int) -> Frame:
        """The frame on the device."""
        staging, num_tokens = self._staging, num_seqs * self._per_seq
        table = staging.tables.send(num_seqs * self._width)
        metadata = StepMetadata(
            num_tokens=num_tokens,
            positions=staging.positions.send(num_tokens),
            slot_mapping=staging.slots.send(num_tokens),
            cum_query_lens=staging.cum_query_lens.send(num_seqs),
            seq_lens=staging.seq_lens.send(num_seqs),
            block_table=table.view(num_seqs, self._width),
            is_captured=True,
        )
        return Frame(token_ids=staging.token_ids.send(num_tokens), metadata=metadata)

    def _write_tokens(
        self, rows: Ints, positions: Ints, is_live: "np.ndarray", num_seqs: int
    ) -> None:
        table, staging = self._table, self._staging
        size, last = table.capacity.block_size, table.capacity.max_model_len - 1
        used, end = positions.size, num_seqs * self._per_seq
        within = np.minimum(positions, last)
        slots = table.block_table[rows, within // size] * size + within % size
        scratch = self._scratch[:used].reshape(positions.shape)
        staging.slots.array[:used] = np.where(is_live, slots, scratch).ravel()
        staging.slots.array[used:end] = self._scratch[used:end]
        ids = np.where(is_live, table.tokens[rows, within], 0)
        for buffer, values in ((staging.token_ids, ids), (staging.positions, within)):
            buffer.array[:used] = values.ravel()
            buffer.array[used:end] = 0

    def _write_tables(self, rows: Ints, num_seqs: int) -> None:
        """All blocks that the rows have had; what lies behind theirs is not read by a live row."""
        count, columns = len(rows), self._table.block_table.shape[1]
        blocks = self._staging.tables.array[: num_seqs * self._width].reshape(num_seqs, self._width)
        blocks[:count, :columns] = self._table.block_table[rows]
        blocks[:count, columns:] = 0
        blocks[count:] = 0
