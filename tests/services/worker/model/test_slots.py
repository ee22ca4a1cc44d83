"""Where checkpoint tensors land in fused and transposed weights."""

import torch

from services.worker.model.slots import plain_slot, stacked_slots, transposed_slot


def test_a_plain_slot_copies_in_the_target_type() -> None:
    target = torch.zeros(3, dtype=torch.bfloat16)
    slot = plain_slot("norm.weight", target)
    slot.store(torch.tensor([1.0, 2.0, 3.0]))
    assert slot.shape == (3,)
    assert target.tolist() == [1.0, 2.0, 3.0]


def test_a_transposed_slot_expects_the_shape_of_the_file() -> None:
    target = torch.zeros(2, 3)
    slot = transposed_slot("w.weight", target)
    assert slot.shape == (3, 2)
    source = torch.arange(6.0).view(3, 2)
    slot.store(source)
    assert torch.equal(target, source.T)


def test_stacked_slots_lie_side_by_side_in_order() -> None:
    weight = torch.zeros(2, 5)
    slots = list(stacked_slots("mlp.", {"gate_proj": 3, "up_proj": 2}, weight))
    assert [(slot.name, slot.shape) for slot in slots] == [
        ("mlp.gate_proj.weight", (3, 2)),
        ("mlp.up_proj.weight", (2, 2)),
    ]
    gate, up = torch.ones(3, 2), torch.full((2, 2), 2.0)
    slots[0].store(gate)
    slots[1].store(up)
    assert torch.equal(weight, torch.cat((gate, up)).T)


def test_one_tensor_may_fill_two_places() -> None:
    rows, columns = torch.zeros(2, 3), torch.zeros(3, 2)
    slot = plain_slot("embed.weight", rows).also(transposed_slot("head.weight", columns))
    slot.store(torch.arange(6.0).view(2, 3))
    assert slot.name == "embed.weight"
    assert torch.equal(rows, columns.T)
