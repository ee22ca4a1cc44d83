"""Where checkpoint tensors land, whole or a rank's part of them."""

import pytest
import torch

from services.worker.model.placement import Placement
from services.worker.model.shards import Cut, Shard, Shards
from services.worker.model.slots import (
    column_slot,
    ignored_slots,
    matrix_slot,
    plain_slot,
    vector_slot,
    windowed_slot,
)


def test_a_plain_slot_copies_in_the_target_type() -> None:
    target = torch.zeros(3, dtype=torch.bfloat16)
    slot = plain_slot("norm.weight", target)
    slot.store(torch.tensor([1.0, 2.0, 3.0]))
    assert slot.shape == slot.kept_shape == (3,)
    assert target.tolist() == [1.0, 2.0, 3.0]


def test_a_whole_matrix_needs_no_window() -> None:
    target = torch.zeros(2, 3)
    slot = matrix_slot("w.weight", target.t(), Shard.whole("w", 3, 2))
    assert slot.shape == (3, 2)
    assert slot.window is None
    source = torch.arange(6.0).view(3, 2)
    slot.store(source)
    assert torch.equal(target, source.T)


@pytest.mark.parametrize("rows", [2, 127, 128, 129, 300])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_matrix_lands_transposed_beside_another_whatever_its_size(
    rows: int, stored: torch.dtype
) -> None:
    product = torch.zeros(5, rows + 3)
    source = torch.arange(rows * 5).view(rows, 5).remainder(251).to(stored)
    target = product[:, 2 : rows + 2].t()
    matrix_slot("w.weight", target, Shard.whole("w", rows, 5)).store(source)
    assert torch.equal(product[:, 2 : rows + 2], source.t().float())
    assert not product[:, :2].any()
    assert not product[:, -1].any()


def test_a_part_of_a_matrix_names_its_rows_and_columns() -> None:
    placement = Placement(tp_size=2, tp_rank=1)
    rows = Shards.cut(placement, "", {"w": 6}, 4, Cut.OUTPUTS).parts[0]
    slot = matrix_slot("w.weight", torch.zeros(3, 4), rows)
    assert slot.shape == (6, 4)
    assert slot.window == (slice(3, 6), slice(0, 4))
    assert slot.kept_shape == (3, 4)
    columns = Shards.cut(placement, "", {"w": 6}, 4, Cut.INPUTS).parts[0]
    assert matrix_slot("w.weight", torch.zeros(6, 2), columns).window == (slice(0, 6), slice(2, 4))


def test_numbers_of_outputs_follow_the_rows_of_their_matrix() -> None:
    placement = Placement(tp_size=2, tp_rank=1)
    part = Shards.cut(placement, "", {"w": 6}, 4, Cut.OUTPUTS).parts[0]
    target = torch.zeros(3)
    column = column_slot("w.weight_scale", target, part)
    assert (column.shape, column.window) == ((6, 1), (slice(3, 6), slice(0, 1)))
    column.store(torch.tensor([[1.0], [2.0], [3.0]]))
    assert target.tolist() == [1.0, 2.0, 3.0]
    vector = vector_slot("w.deq_scale", target, part)
    assert (vector.shape, vector.window) == ((6,), (slice(3, 6),))
    by_inputs = Shards.cut(placement, "", {"w": 6}, 4, Cut.INPUTS).parts[0]
    assert vector_slot("w.deq_scale", torch.zeros(6), by_inputs).window is None


def test_an_ignored_tensor_is_known_and_not_read() -> None:
    (slot,) = ignored_slots({"w.weight_offset": (6, 1)})
    assert slot.shape == (6, 1)
    assert slot.kept_shape == (0, 0)
    assert not slot.is_required
    slot.store(torch.empty(0, 0))


def test_one_tensor_may_fill_two_places() -> None:
    rows, columns = torch.zeros(2, 3), torch.zeros(3, 2)
    whole = Shard.whole("embed", 2, 3)
    slot = matrix_slot("embed.weight", rows, whole).also(
        matrix_slot("embed.weight", columns.t(), whole)
    )
    slot.store(torch.arange(6.0).view(2, 3))
    assert slot.name == "embed.weight"
    assert torch.equal(rows, columns.T)


def test_a_slot_may_take_its_part_in_its_own_way() -> None:
    seen: list[torch.Tensor] = []
    window = (slice(0, 2), slice(1, 2))
    slot = windowed_slot("w.scale_bias", seen.append, (2, 3), window, frozenset({"F32"}))
    slot.store(torch.ones(2, 1))
    assert slot.window == window
    assert seen[0].shape == slot.kept_shape
