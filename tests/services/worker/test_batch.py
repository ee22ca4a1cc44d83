import numpy as np
import pytest
import torch

from services.worker.batch import BatchBuilder, ends_of_runs
from services.worker.contract import begin_step
from services.worker.graphs.sizes import CaptureSizes
from services.worker.rows import RowTable
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence

CPU = torch.device("cpu")


@pytest.fixture
def table() -> RowTable:
    """Block size 4: row 3 decodes at position 5, row 1 has 7 prompt tokens."""
    table = RowTable(make_capacity())
    table.admit(make_sequence(3, [10, 11, 12, 13, 14], outputs=[15], computed=5))
    table.block_table[3, :2], table.num_blocks[3] = (8, 9), 2
    table.admit(make_sequence(1, [20, 21, 22, 23, 24, 25, 26]))
    return table


def plan_of(**entries: Entry) -> dict[int, Entry]:
    return {int(name[1:]): entry for name, entry in entries.items()}


MIXED = plan_of(_3=Entry(computed=5), _1=Entry(scheduled=6, blocks=(5, 2)))


def build(table: RowTable, entries: dict[int, Entry], *, multiple: int = 1):  # noqa: ANN201
    active = begin_step(make_plan(1, entries), table, 1, lambda new: None)
    return BatchBuilder(table, CPU, row_multiple=multiple).build(active)


def test_chunks_and_decodes_stand_behind_each_other(table: RowTable) -> None:
    batch = build(table, MIXED)
    step = batch.metadata
    assert batch.token_ids.tolist() == [15, 20, 21, 22, 23, 24, 25]
    assert step.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert step.slot_mapping.tolist() == [37, 20, 21, 22, 23, 8, 9]
    assert step.cum_query_lens.tolist() == [1, 7]
    assert step.seq_lens.tolist() == [6, 6]
    assert step.block_table.tolist() == [[8, 9], [5, 2]]
    assert step.num_tokens == 7


def test_only_a_chunk_that_reaches_the_known_end_samples(table: RowTable) -> None:
    batch = build(table, MIXED)
    assert batch.sampling_entries.tolist() == [0]
    assert batch.sampling_positions is not None
    assert batch.sampling_positions.tolist() == [0]
    table.num_computed[1] = 6
    whole = build(table, plan_of(_3=Entry(computed=5), _1=Entry(scheduled=1, computed=6)))
    assert whole.sampling_entries.tolist() == [0, 1]
    assert whole.sampling_positions is None


def test_padding_is_a_last_sequence_of_length_zero_in_the_scratch_block(table: RowTable) -> None:
    batch = build(table, MIXED, multiple=4)
    step = batch.metadata
    assert step.num_tokens == 8
    assert batch.token_ids.tolist()[7:] == [0]
    assert step.slot_mapping.tolist()[7:] == [0]
    assert step.cum_query_lens.tolist() == [1, 7, 8]
    assert step.seq_lens.tolist() == [6, 6, 0]
    assert step.block_table.tolist()[2] == [0, 0]
    assert batch.sampling_positions is not None
    assert len(batch.sampling_positions) == 4


def test_a_full_multiple_gets_no_padding_sequence(table: RowTable) -> None:
    entries = plan_of(_3=Entry(computed=5), _1=Entry(scheduled=7, blocks=(5, 2)))
    assert build(table, entries, multiple=4).metadata.cum_query_lens.tolist() == [1, 8]


def test_types_are_those_of_the_operators_and_the_table_is_contiguous(table: RowTable) -> None:
    batch = build(table, MIXED)
    step = batch.metadata
    assert (batch.token_ids.dtype, step.positions.dtype) == (torch.int64, torch.int64)
    lists = (step.slot_mapping, step.cum_query_lens, step.seq_lens, step.block_table)
    assert {one.dtype for one in lists} == {torch.int32}
    assert step.block_table.is_contiguous()


def test_buffers_keep_their_addresses(table: RowTable) -> None:
    builder = BatchBuilder(table, CPU, row_multiple=4)
    active = begin_step(make_plan(1, MIXED), table, 1, lambda new: None)
    first = builder.build(active)
    pointers = [first.token_ids.data_ptr(), first.metadata.block_table.data_ptr()]
    second = builder.build(active)
    assert [second.token_ids.data_ptr(), second.metadata.block_table.data_ptr()] == pointers


def test_the_largest_step_fits_the_buffers() -> None:
    limits = make_capacity(num_blocks=200)
    table = RowTable(limits)
    entries = {}
    for row, scheduled in enumerate((29, 1, 1, 1)):
        table.admit(make_sequence(row, [1] * 39))
        blocks = tuple(range(1 + 10 * row, 11 + 10 * row))
        entries[row] = Entry(scheduled=scheduled, blocks=blocks)
    plan = make_plan(1, entries)
    active = begin_step(plan, table, 1, lambda new: None)
    assert active.num_tokens == limits.max_num_batched_tokens
    batch = BatchBuilder(table, CPU, row_multiple=4).build(active)
    assert batch.metadata.num_tokens == 32
    assert np.all(batch.metadata.slot_mapping.numpy() >= 4)


def test_decodes_take_a_captured_size_and_other_steps_their_own(table: RowTable) -> None:
    table.num_computed[1], table.num_blocks[1] = 6, 2
    sizes = CaptureSizes(rows_per_seq=1, sizes=(1, 4))
    builder = BatchBuilder(table, CPU, row_multiple=1, sizes=sizes)
    decodes = plan_of(_3=Entry(computed=5), _1=Entry(computed=6))
    batch = builder.build(begin_step(make_plan(1, decodes), table, 1, lambda new: None))
    assert batch.metadata.is_captured
    assert batch.metadata.num_tokens == 4
    assert batch.metadata.seq_lens.tolist() == [6, 7, 0, 0]
    assert batch.sampling_positions is not None
    assert batch.sampling_positions.tolist() == [0, 1]
    assert batch.row_ends.tolist() == [1, 2]
    table.num_computed[1] = 0
    batch = builder.build(begin_step(make_plan(1, MIXED), table, 1, lambda new: None))
    assert not batch.metadata.is_captured
    assert batch.metadata.num_tokens == 7
    assert batch.row_ends.tolist() == [1, 7]
    assert batch.token_places is None


@pytest.fixture
def drafting() -> RowTable:
    """As `table`, with room for three drafts; row 3 has two, tokens 90 and 91."""
    table = RowTable(make_capacity(num_speculative_tokens=3))
    table.admit(make_sequence(3, [10, 11, 12, 13, 14], outputs=[15], computed=5))
    table.block_table[3, :2], table.num_blocks[3] = (8, 9), 2
    table.tokens[3, 6:8], table.num_drafts[3] = (90, 91), 2
    table.admit(make_sequence(1, [20, 21, 22, 23, 24, 25, 26]))
    return table


def test_drafts_follow_the_last_known_token_and_all_of_them_are_sampled(drafting: RowTable) -> None:
    entries = plan_of(_1=Entry(scheduled=3, blocks=(5,)), _3=Entry(scheduled=4, computed=5))
    batch = build(drafting, entries)
    assert batch.token_ids.tolist() == [20, 21, 22, 15, 90, 91]
    assert batch.metadata.positions.tolist() == [0, 1, 2, 5, 6, 7]
    assert batch.metadata.seq_lens.tolist() == [3, 8]
    assert batch.sampling_entries.tolist() == [1]
    assert batch.num_sampled == 3
    assert batch.sampling_positions is not None
    assert batch.sampling_positions.tolist() == [3, 4, 5]
    assert batch.token_rows.tolist() == [1, 1, 1, 3, 3, 3]
    assert batch.token_positions.tolist() == [0, 1, 2, 5, 6, 7]


def test_a_step_of_drafts_alone_samples_all_of_it(drafting: RowTable) -> None:
    batch = build(drafting, plan_of(_3=Entry(scheduled=4, computed=5)))
    assert batch.num_sampled == 3
    assert batch.sampling_positions is None


def test_runs_of_places_end_where_they_should() -> None:
    found = ends_of_runs(np.array([4, 9, 10]), np.array([2, 4, 1]))
    assert found.tolist() == [3, 4, 6, 7, 8, 9, 10]
    assert ends_of_runs(np.array([], np.int64), np.array([], np.int64)).tolist() == []
