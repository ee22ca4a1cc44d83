"""Exchanges between processes over Gloo, and a group of one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.parallel.groups import Groups, OneRank
from tests.services.worker.parallel.group_cases import values_of
from tests.services.worker.parallel.ranks import Ranks


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, "float32"), (2, "bfloat16"), (3, "float32"), (4, "float32"), (4, "int8")],
)
def test_every_exchange_does_what_it_says(ranks: Ranks, size: int, dtype: str) -> None:
    found = ranks.run(size, "group_cases:every_exchange", topology=f"tp{size}", dtype=dtype)
    exact = sum(values_of(rank, dtype).double() for rank in range(size))
    for rank, one in enumerate(found):
        # Replicated computations rely on it: the same bits on every rank, whatever the order.
        assert torch.equal(one["sum"], found[0]["sum"])
        if dtype == "float32":
            torch.testing.assert_close(one["sum"].double(), exact, rtol=1e-5, atol=1e-5)
        ramps = [torch.arange(6).view(2, 3) + 10 * other for other in range(size)]
        assert torch.equal(one["rows"], torch.cat(ramps))
        assert torch.equal(one["columns"], torch.cat(ramps, dim=1))
        summed = size * torch.arange(2 * size) + sum(range(size))
        assert one["part"][:, 0].tolist() == summed.chunk(size)[rank].tolist()
        senders = [other for other in range(size) for _ in range(1 + (rank + other) % 3)]
        assert one["moved"][:, 0].tolist() == senders
        assert one["counts"] == [[other, 7] for other in range(size)]
        assert one["told"].tolist() == [size - 1] * 2
        assert one["ring"].tolist() == [(rank - 1) % size] * 3
        assert (one["fused"], one["meeting"]) == (rank, "")
        # One each, and two of the ring; the sending rank waits in neither longer than in others.
        assert one["num_meetings"] == 10


def test_an_exchange_that_nobody_joins_ends_in_time(ranks: Ranks) -> None:
    complaint, _ = ranks.run(2, "group_cases:wait_too_long")
    assert "imed out" in complaint


def test_a_group_of_one_hands_back_what_it_gets() -> None:
    group, x = OneRank("tp"), torch.ones(3, 2)
    calls: list[Callable[[], Any]] = [
        lambda: group.all_reduce(x),
        lambda: group.all_gather(x, dim=1),
        lambda: group.reduce_scatter(x),
        lambda: group.all_to_all(x, [3], [3]),
        lambda: group.broadcast(x, 0),
        lambda: group.fused("something", lambda: x),
    ]
    assert all(call() is x for call in calls)
    assert group.gather_counts(torch.tensor([2, 3])) == [[2, 3]]
    with pytest.raises(AssertionError, match="no member 1"):
        group.send(x, 1)
    with pytest.raises(AssertionError, match="no member 1"):
        group.receive(x, 1)


def test_by_default_a_rank_is_alone() -> None:
    groups = Groups()
    every = (groups.tp, groups.pp, groups.dp, groups.ep, groups.mc2, groups.replica, groups.orders)
    assert [group.name for group in every] == ["tp", "pp", "dp", "ep", "mc2", "replica", "orders"]
    assert {(group.size, group.rank) for group in every} == {(1, 0)}
