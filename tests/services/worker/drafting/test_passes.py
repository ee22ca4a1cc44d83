"""Block size 4: row 3 knows 8 tokens in blocks 8, 9, 10; row 1 knows 3 in block 5."""

import numpy as np
import pytest
import torch

from services.worker.drafting.passes import DraftPass, PassBuilder
from services.worker.rows import RowTable
from tests.services.worker.plans import make_capacity, make_sequence

CPU = torch.device("cpu")


@pytest.fixture
def table() -> RowTable:
    table = RowTable(make_capacity(num_speculative_tokens=5))
    for row, size, blocks in ((3, 8, (8, 9, 10)), (1, 3, (5,))):
        table.admit(make_sequence(row, range(size)))
        table.block_table[row, : len(blocks)] = blocks
        table.num_blocks[row] = len(blocks)
    return table


def build(table: RowTable, counts: list[int], *, multiple: int = 1) -> list[DraftPass]:
    builder = PassBuilder(table, CPU, row_multiple=multiple)
    return builder.build(np.array([3, 1]), np.array(counts))


def test_each_pass_is_one_position_further(table: RowTable) -> None:
    passes = build(table, [3, 3])
    assert [each.count for each in passes] == [2, 2]
    assert [each.metadata.positions.tolist() for each in passes] == [[7, 2], [8, 3]]
    assert [each.metadata.slot_mapping.tolist() for each in passes] == [[39, 22], [40, 23]]
    assert [each.metadata.seq_lens.tolist() for each in passes] == [[8, 3], [9, 4]]
    for each in passes:
        assert each.metadata.cum_query_lens.tolist() == [1, 2]
        assert each.metadata.block_table.tolist() == [[8, 9, 10], [5, 0, 0]]


def test_a_row_with_fewer_drafts_leaves_earlier(table: RowTable) -> None:
    passes = build(table, [4, 2])
    assert [each.count for each in passes] == [2, 1, 1]
    assert [each.metadata.positions.tolist() for each in passes] == [[7, 2], [8], [9]]
    assert passes[2].metadata.block_table.tolist() == [[8, 9, 10]]


def test_one_draft_needs_no_later_pass(table: RowTable) -> None:
    assert build(table, [1, 1]) == []


def test_passes_share_no_memory(table: RowTable) -> None:
    """A device may still read one while the next is written."""
    passes = build(table, [5, 5])
    pointers = {each.metadata.positions.data_ptr() for each in passes}
    assert len(pointers) == len(passes)


def test_padding_is_a_last_sequence_of_length_zero_in_the_scratch_block(table: RowTable) -> None:
    step = build(table, [2, 2], multiple=4)[0].metadata
    assert step.num_tokens == 4
    assert step.positions.tolist() == [7, 2, 0, 0]
    assert step.slot_mapping.tolist() == [39, 22, 0, 1]
    assert step.cum_query_lens.tolist() == [1, 2, 4]
    assert step.seq_lens.tolist() == [8, 3, 0]
    assert step.block_table.tolist() == [[8, 9], [5, 0], [0, 0]]
    assert step.block_table.dtype is step.slot_mapping.dtype is torch.int32


def test_a_position_past_the_last_block_of_another_row_is_never_looked_up() -> None:
    table = RowTable(make_capacity(num_speculative_tokens=5, max_model_len=8))
    for row, size in ((3, 3), (1, 7)):
        table.admit(make_sequence(row, range(size)))
        table.block_table[row, :2], table.num_blocks[row] = (2 * row, 2 * row + 1), 2
    passes = build(table, [4, 1])
    assert [each.metadata.positions.tolist() for each in passes] == [[2], [3], [4]]
