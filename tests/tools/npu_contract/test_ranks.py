"""Groups without members give the shapes that groups with members would."""

import pytest
import torch

from services.worker.model.placement import Placement
from services.worker.parallel.groups import Group
from tools.npu_contract.ranks import ShapeGroup, make_groups


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.fixture
def group() -> ShapeGroup:
    return ShapeGroup("ep", 4, 1)


def test_it_has_a_groups_face(group: Group) -> None:
    assert (group.name, group.size, group.rank, group.handle) == ("ep", 4, 1, "ep")
    assert group.fused("dispatch", lambda: 3) == 3


def test_exchanges_change_sizes_as_real_ones(group: ShapeGroup) -> None:
    x = meta(8, 5)
    assert group.all_reduce(x) is x
    assert group.all_gather(x).shape == (32, 5)
    assert group.all_gather(x, dim=1).shape == (8, 20)
    assert group.reduce_scatter(x).shape == (2, 5)
    assert group.all_to_all(x, [1, 2, 3, 4], [2, 2, 2, 2]).shape == (10, 5)
    assert group.receive(x, 0) is group.broadcast(x, 0) is x


def test_rows_that_are_not_sent_are_noticed(group: ShapeGroup) -> None:
    with pytest.raises(AssertionError):
        group.all_to_all(meta(8, 5), [1, 2, 3, 4], [2, 2, 2, 1])
    with pytest.raises(AssertionError):
        group.reduce_scatter(meta(9, 5))
    with pytest.raises(AssertionError):
        group.send(meta(1), 1)


def test_all_rows_are_counted(group: ShapeGroup) -> None:
    group.num_rows = 11
    assert group.gather_counts(meta(3)) == [[4, 4, 3]] * 4


def test_groups_follow_from_a_placement() -> None:
    groups = make_groups(Placement(tp_size=8, tp_rank=1, ep_size=16, ep_rank=9))
    assert (groups.tp.size, groups.tp.rank) == (8, 1)
    assert (groups.dp.size, groups.dp.rank) == (2, 1)
    assert (groups.ep.size, groups.ep.rank, groups.mc2.handle) == (16, 9, "mc2")
    stage = make_groups(Placement(first_layer=4), num_stages=2)
    assert (stage.pp.size, stage.pp.rank, stage.dp.size) == (2, 1, 1)
