"""What the layers of a step share."""

import torch

from services.worker.model.metadata import StepMetadata
from services.worker.model.rope import RotaryTables
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
