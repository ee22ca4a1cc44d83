"""What a step's metadata promises, held against the steps that the worker makes up itself."""

import pytest
import torch

from services.worker.dummy import dummy_step
from services.worker.model.metadata import StepMetadata


@pytest.fixture(params=[(1, 1), (3, 1), (2, 130)], ids=str)
def step(request: pytest.FixtureRequest) -> StepMetadata:
    num_seqs, tokens = request.param
    return dummy_step(num_seqs, tokens, torch.device("cpu"))[1]


def test_columns_have_one_entry_per_token_or_per_sequence(step: StepMetadata) -> None:
    assert len(step.positions) == len(step.slot_mapping) == step.num_tokens
    assert len(step.cum_query_lens) == len(step.seq_lens) == len(step.block_table)
    assert int(step.cum_query_lens[-1]) == step.num_tokens


def test_types_are_those_that_the_operators_take(step: StepMetadata) -> None:
    assert step.positions.dtype == torch.int64
    columns = (step.slot_mapping, step.cum_query_lens, step.seq_lens, step.block_table)
    assert {column.dtype for column in columns} == {torch.int32}


def test_every_position_lies_in_a_block_of_its_sequence(step: StepMetadata) -> None:
    longest = int(step.positions.max()) + 1
    assert int(step.seq_lens.max()) == longest
    assert step.block_table.shape[1] * 128 >= longest


def test_a_step_stands_alone_unless_it_is_told_otherwise(step: StepMetadata) -> None:
    assert step.traffic is None
    assert not step.is_captured
