"""Which experts a rank holds, and the sum over those that are here."""

from dataclasses import replace

import pytest
import torch

from services.worker.model.placement import Placement
from services.worker.model.routed import ExpertShards
from services.worker.model.spec import ModelSpec


@pytest.fixture
def second_half(spec: ModelSpec) -> ExpertShards:
    return ExpertShards.cut(replace(spec, placement=Placement(ep_size=2, ep_rank=1)), "e.")


def test_a_rank_has_whole_experts_or_a_part_of_each(
    spec: ModelSpec, second_half: ExpertShards
) -> None:
    assert (second_half.active_range, second_half.width) == ([4, 8], 32)
    cut = ExpertShards.cut(replace(spec, placement=Placement(tp_size=4, tp_rank=1)), "e.")
    assert (cut.active_range, cut.columns) == ([0, 8], slice(8, 16))
    gate, up, down = next(iter(cut.matrices()))
    assert [name for name, _ in (gate, up, down)] == [
        "e.0.gate_proj.",
        "e.0.up_proj.",
        "e.0.down_proj.",
    ]
    assert (gate[1].target, up[1].target) == (slice(0, 8), slice(8, 16))
    assert (up[1].rows, down[1].columns) == (slice(8, 16), slice(8, 16))


def test_choices_that_are_elsewhere_add_nothing(second_half: ExpertShards) -> None:
    products = torch.full((4, 3), torch.nan)
    products[0], products[1] = 1.0, 10.0
    order = torch.tensor([-1, 1, 0, -1], dtype=torch.int32)
    weights = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
    total = second_half.add_up(products, order, weights)
    assert total.tolist() == [[20.0] * 3, [3.0] * 3]


def test_a_rank_that_computed_nothing_adds_zero(second_half: ExpertShards) -> None:
    products = torch.full((4, 3), torch.nan)
    order = torch.full((4,), -1, dtype=torch.int32)
    total = second_half.add_up(products, order, torch.ones(2, 2))
    assert total.tolist() == [[0.0] * 3] * 2
