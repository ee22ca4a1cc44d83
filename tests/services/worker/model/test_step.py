"""What the layers of a step share."""

from dataclasses import replace

import torch

from services.worker.model.metadata import StepMetadata
from services.worker.model.placement import Placement
from services.worker.model.rope import RotaryTables
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs


def test_slots_are_widened_and_angles_looked_up_by_position() -> None:
    tables = RotaryTables(
        dim=64, theta=1e4, max_positions=50, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    step = StepMetadata(
        num_tokens=2,
        positions=torch.tensor([4, 40]),
        slot_mapping=torch.tensor([132, 300], dtype=torch.int32),
        cum_query_lens=torch.tensor([1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([5, 41], dtype=torch.int32),
        block_table=torch.tensor([[1], [2]], dtype=torch.int32),
    )
    inputs = StepInputs.prepare(step, tables)
    assert inputs.slots.dtype == torch.int64  # the device's cache write takes no int32
    assert inputs.slots.tolist() == [132, 300]
    assert torch.equal(inputs.cos, tables.at(step.positions)[0])
    assert inputs.sin.dtype == torch.bfloat16
    assert inputs.block_table is step.block_table


def test_ranks_that_cut_tokens_have_angles_and_lengths_of_their_share(spec: ModelSpec) -> None:
    """Queries of 3 and 2 tokens, the first with 4 keys before them, on the second of two ranks."""
    tables = RotaryTables(
        dim=64, theta=1e4, max_positions=50, dtype=torch.float32, device=torch.device("cpu")
    )
    step = StepMetadata(
        num_tokens=5,
        positions=torch.tensor([4, 5, 6, 0, 1]),
        slot_mapping=torch.arange(128, 133, dtype=torch.int32),
        cum_query_lens=torch.tensor([3, 5], dtype=torch.int32),
        seq_lens=torch.tensor([7, 2], dtype=torch.int32),
        block_table=torch.tensor([[1, 4], [2, 0]], dtype=torch.int32),
    )
    placement = Placement(tp_size=2, tp_rank=1, is_dsa_cp=True)
    inputs = StepInputs.prepare(step, tables, replace(spec, placement=placement))
    assert inputs.slots.tolist() == step.slot_mapping.tolist()
    assert torch.equal(inputs.cos, tables.at(torch.tensor([0, 1, 0]))[0])
    assert inputs.num_rows == 3
    # The third row is padding: a sequence of its own, without keys, in the scratch block.
    assert inputs.cum_query_lens.tolist() == [0, 2, 3]
    assert inputs.seq_lens.tolist() == [0, 2, 0]
    assert inputs.block_table.tolist() == [[1, 4], [2, 0], [0, 0]]
    assert not inputs.stream.is_cut
    first = replace(placement, tp_rank=0, is_flashcomm=True)
    inputs = StepInputs.prepare(step, tables, replace(spec, placement=first))
    assert inputs.cum_query_lens.tolist() == [3, 3, 3]
    assert inputs.seq_lens.tolist() == [7, 0, 0]
    assert inputs.stream.is_cut
    assert inputs.stream.num_rows == 3
