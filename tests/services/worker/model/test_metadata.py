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


def test_tokens_of_a_step_see_what_they_saw_in_it() -> None:
    step = StepMetadata(
        num_tokens=6,
        positions=torch.tensor([7, 8, 0, 130, 131, 132]),
        slot_mapping=torch.tensor([135, 136, 256, 514, 515, 516], dtype=torch.int32),
        cum_query_lens=torch.tensor([2, 3, 6], dtype=torch.int32),
        seq_lens=torch.tensor([9, 1, 133], dtype=torch.int32),
        block_table=torch.tensor([[1, 0], [2, 0], [3, 4]], dtype=torch.int32),
    )
    some = step.of_tokens(torch.tensor([5, 1, 3, 2]))
    assert some.num_tokens == 4
    assert some.positions.tolist() == [132, 8, 130, 0]
    assert some.slot_mapping.tolist() == [516, 136, 514, 256]
    assert some.cum_query_lens.tolist() == [1, 2, 3, 4]
    assert some.seq_lens.tolist() == [133, 9, 131, 1]
    assert some.block_table.tolist() == [[3, 4], [1, 0], [3, 4], [2, 0]]
    test_types_are_those_that_the_operators_take(some)
