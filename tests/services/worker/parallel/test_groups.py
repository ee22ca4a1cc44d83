"""Exchanges between processes over Gloo, and a group of one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker import kv_cache
from services.worker.dummy import dummy_step
from services.worker.loading.load import load_model
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
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


class Forbidden:
    """A group of one that may be asked for the sum over its members, and for nothing else."""

    name, handle, size, rank = "tp", "", 1, 0

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return x

    def __getattr__(self, method: str) -> Any:
        raise AssertionError(f"a rank alone called {method}")


def test_a_model_on_one_rank_exchanges_nothing(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint(num_nextn_predict_layers=1).path
    group: Any = Forbidden()
    alone = Groups(tp=group, pp=group, dp=group, ep=group, mc2=group)
    spec = ModelSpec(
        config=ModelConfig.from_dir(path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        groups=alone,
        has_mtp=True,
    )
    decoder = load_model(path, spec)
    caches = kv_cache.allocate(spec, 4)
    ids, step = dummy_step(2, 1, spec.device)
    hidden = decoder.forward(ids, step, caches)
    assert decoder.compute_logits(hidden).shape == (2, 97)
    drafted = decoder.draft(ids, hidden, step, caches)
    assert decoder.compute_draft_logits(drafted).shape == (2, 97)
    # Two in each of four layers and the MTP layer: calls that hand on what they are given.
    assert group.num_sums == 10
