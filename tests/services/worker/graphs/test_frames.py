"""Decode steps in the form of a captured one."""

import numpy as np
import pytest
import torch

from services.worker.contract import ActiveRows, begin_step
from services.worker.graphs.frames import Frames
from services.worker.graphs.sizes import CaptureSizes
from services.worker.rows import RowTable
from services.worker.staging import StepStaging
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence

SIZES = CaptureSizes(rows_per_seq=3, sizes=(3, 6, 12))


@pytest.fixture
def table() -> RowTable:
    """Block size 4. Row 3 is at position 5 and has two drafts; row 1 at position 2 with none."""
    table = RowTable(make_capacity(num_speculative_tokens=2, max_model_len=38))
    table.admit(make_sequence(3, [10, 11, 12, 13, 14], outputs=[15], computed=5))
    table.block_table[3, :2], table.num_blocks[3] = (8, 9), 2
    table.tokens[3, 6:8], table.num_drafts[3] = (90, 91), 2
    table.admit(make_sequence(1, [20, 21], outputs=[22], computed=2))
    table.block_table[1, 0], table.num_blocks[1] = 5, 1
    return table


def frames_of(table: RowTable) -> Frames:
    return Frames(table, StepStaging(table.capacity, 40, 5, torch.device("cpu")), SIZES)


def active_of(table: RowTable, entries: dict[int, Entry]) -> ActiveRows:
    return begin_step(make_plan(1, entries), table, 1, lambda new: None)


TWO = {3: Entry(scheduled=3, computed=5), 1: Entry(scheduled=3, computed=2)}


def test_each_sequence_has_all_its_rows_and_padding_follows(table: RowTable) -> None:
    frames, active = frames_of(table), active_of(table, TWO)
    assert frames.fitting(active) == 2
    frames.write(active, 4)
    frame = frames.send(4)
    step = frame.metadata
    assert step.num_tokens == 12
    assert step.is_captured
    assert frame.token_ids.tolist() == [15, 90, 91, 22, 0, 0, *[0] * 6]
    assert step.positions.tolist() == [5, 6, 7, 2, 3, 4, *[0] * 6]
    # Row 1 has room for a token at position 3, but no draft: its rows there are dead.
    assert step.slot_mapping.tolist() == [37, 38, 39, 22, 0, 1, 2, 3, 0, 1, 2, 3]
    assert step.cum_query_lens.tolist() == [3, 6, 9, 12]
    assert step.seq_lens.tolist() == [8, 5, 0, 0]
    assert step.block_table[0, :2].tolist() == [8, 9]
    assert step.block_table[1, 0].item() == 5
    assert not step.block_table[2:].any()


def test_what_is_live_is_told(table: RowTable) -> None:
    frames, active = frames_of(table), active_of(table, TWO)
    live = frames.write(active, 2)
    assert live.rows.tolist() == [3, 3, 3, 1]
    assert live.positions.tolist() == [5, 6, 7, 2]
    assert live.places is not None
    assert live.places.tolist() == [0, 1, 2, 3]
    assert live.row_ends.tolist() == [3, 4]
    other = active_of(table, dict(reversed(TWO.items())))
    live = frames.write(other, 2)
    assert live.places is not None
    assert live.places.tolist() == [0, 3, 4, 5]
    assert live.row_ends.tolist() == [1, 6]


def test_without_dead_rows_all_stand_behind_each_other(table: RowTable) -> None:
    frames = frames_of(table)
    live = frames.write(active_of(table, {3: Entry(scheduled=3, computed=5)}), 2)
    assert live.places is None
    assert live.rows.tolist() == [3, 3, 3]
    assert live.positions.tolist() == [5, 6, 7]
    assert live.row_ends.tolist() == [3]


def test_a_dead_row_at_the_end_of_the_context_stays_inside(table: RowTable) -> None:
    """Positions have rotary angles up to max_model_len; tables reach as far as lengths do."""
    table.free(3)
    table.admit(make_sequence(3, [1] * 36, outputs=[7], computed=36))
    table.block_table[3, :10], table.num_blocks[3] = np.arange(2, 12), 10
    frames = frames_of(table)
    frames.write(active_of(table, {3: Entry(scheduled=1, computed=36)}), 1)
    step = frames.send(1).metadata
    assert step.positions.tolist() == [36, 37, 37]
    assert step.slot_mapping.tolist() == [11 * 4, 1, 2]
    assert step.seq_lens.tolist() == [39]
    assert step.block_table.shape[1] * 4 >= 39


def test_prompts_do_not_fit(table: RowTable) -> None:
    table.admit(make_sequence(2, [1] * 9))
    active = active_of(table, TWO | {2: Entry(scheduled=9, blocks=(1, 2, 3))})
    assert frames_of(table).fitting(active) is None


def test_a_frame_of_nobody_writes_into_the_scratch_block(table: RowTable) -> None:
    frames = frames_of(table)
    frames.write(active_of(table, TWO), 4)
    frames.write_nothing(4)
    assert frames.send(4).metadata.seq_lens.tolist() == [0, 0, 0, 0]
    frames.write_nothing(4, seq_len=3)
    frame = frames.send(4)
    assert not frame.token_ids.any()
    assert frame.metadata.slot_mapping.max() < 4
    assert frame.metadata.seq_lens.tolist() == [3, 3, 3, 3]
    assert not frame.metadata.block_table.any()


def test_tensors_of_a_size_stay_where_they_are(table: RowTable) -> None:
    frames = frames_of(table)

    def addresses() -> list[int]:
        frame = frames.send(4)
        step = frame.metadata
        tensors = (frame.token_ids, step.positions, step.slot_mapping, step.cum_query_lens)
        return [t.data_ptr() for t in (*tensors, step.seq_lens, step.block_table)]

    first = addresses()
    frames.write(active_of(table, TWO), 4)
    frames.send(1)
    assert addresses() == first
