import torch
from torch import Tensor

from services.worker.graphs.buffers import StepBuffers
from services.worker.model.metadata import StepMetadata
from tests.services.worker.plans import make_capacity

LIMITS = make_capacity(block_size=128, max_model_len=400)


def step_of(lens: list[int], table: list[list[int]]) -> StepMetadata:
    ends = torch.tensor(lens).cumsum(0).to(torch.int32)
    num_tokens = sum(lens)
    return StepMetadata(
        num_tokens=num_tokens,
        positions=torch.arange(num_tokens) + 7,
        slot_mapping=torch.arange(num_tokens, dtype=torch.int32) + 300,
        cum_query_lens=ends,
        seq_lens=torch.tensor([length + 10 for length in lens], dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
    )


def addresses(step: StepMetadata) -> list[int]:
    tensors: tuple[Tensor, ...] = (
        step.positions,
        step.slot_mapping,
        step.cum_query_lens,
        step.seq_lens,
        step.block_table,
    )
    return [tensor.data_ptr() for tensor in tensors]


def test_a_step_is_followed_by_sequences_of_nothing() -> None:
    buffers = StepBuffers(LIMITS, 16, 4)
    buffers.fill(torch.arange(9), step_of([2, 3, 4], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    buffers.fill(torch.arange(5) + 20, step_of([4, 1], [[3], [2]]))
    token_ids, step = buffers.step(5)
    assert token_ids.tolist() == [20, 21, 22, 23, 24]
    assert step.num_tokens == 5
    assert step.positions.tolist() == [7, 8, 9, 10, 11]
    assert step.slot_mapping.tolist() == [300, 301, 302, 303, 304]
    assert step.cum_query_lens.tolist() == [4, 5, 5, 5]
    assert step.seq_lens.tolist() == [14, 11, 0, 0]
    assert step.block_table.shape == (4, 4)
    assert step.block_table[:2, 0].tolist() == [3, 2]


def test_addresses_and_forms_stay() -> None:
    buffers = StepBuffers(LIMITS, 16, 4)
    before = buffers.step(16)
    buffers.fill(torch.arange(3), step_of([1, 2], [[1, 2, 3, 4], [5, 6, 7, 8]]))
    after = buffers.step(3)
    assert before[0].data_ptr() == after[0].data_ptr()
    assert addresses(before[1]) == addresses(after[1])
    assert before[1].block_table.shape == after[1].block_table.shape
    types = [torch.int64, torch.int32, torch.int32, torch.int32, torch.int32]
    found = (
        after[1].positions,
        after[1].slot_mapping,
        after[1].cum_query_lens,
        after[1].seq_lens,
        after[1].block_table,
    )
    assert [tensor.dtype for tensor in found] == types
