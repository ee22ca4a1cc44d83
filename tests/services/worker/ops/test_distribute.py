"""The fused exchange on threads that hand rows to each other, against the plain formula."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.ops import distribute
from services.worker.ops.meta_distribute import kernels as shapes

RANKS, TOKENS, CHOICES, WIDTH = 4, 5, 2, 8


class Exchange:
    """All-to-all between the threads that take part in a test."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._barrier = threading.Barrier(RANKS, timeout=20)
        self._parts: list[list[Tensor]] = [[] for _ in range(RANKS)]

    def __call__(
        self, rows: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None, group: str
    ) -> Tensor:
        assert group == "experts"
        rank = self._local.rank
        self._parts[rank] = list(rows.split(list(sent) if sent else [1] * len(rows)))
        self._barrier.wait()
        arrived = [self._parts[source][rank] for source in range(RANKS)]
        self._barrier.wait()
        assert received is None or [len(part) for part in arrived] == list(received)
        return torch.cat(arrived)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def on_thread(rank: int) -> Any:
            self._local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(on_thread, range(RANKS)))


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Exchange:
    made = Exchange()
    monkeypatch.setattr(distribute, "_exchange", made)
    return made


def where(rank: int, num_experts: int) -> dict[str, Any]:
    return {
        "group_ep": "experts",
        "ep_world_size": RANKS,
        "ep_rank_id": rank,
        "moe_expert_num": num_experts,
    }


def make_tokens(
    rank: int, num_experts: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS, num_experts, generator=generator)
    return {
        "x": torch.randn(TOKENS, WIDTH, generator=generator).to(dtype),
        "expert_ids": scores.topk(CHOICES).indices.to(torch.int32),
        # Ranks have one token less each; the first rank has all.
        "x_active_mask": torch.arange(TOKENS) < TOKENS - rank,
        "expert_scales": torch.rand(TOKENS, CHOICES, generator=generator),
    }


def dispatch(rank: int, num_experts: int, given: dict[str, Tensor], **changes: Any) -> Any:
    named = {name: given[name] for name in ("x", "expert_ids", "x_active_mask")}
    return distribute.dispatch(**named, **where(rank, num_experts), **changes)


@pytest.mark.parametrize("num_experts", [4, 8])
def test_tokens_meet_their_experts_and_sums_come_back(exchange: Exchange, num_experts: int) -> None:
    """Expert e multiplies by e + 1."""
    own = num_experts // RANKS

    def work(rank: int) -> Tensor:
        given = make_tokens(rank, num_experts)
        rows, _, info, counts, sums, none, _ = dispatch(rank, num_experts, given)
        factors = torch.arange(rank * own, (rank + 1) * own).repeat_interleave(counts) + 1.0
        rows[: len(factors)] *= factors[:, None]
        rows[len(factors) :] = float("nan")  # as a kernel may leave them
        return distribute.combine(
            rows,
            given["expert_ids"],
            info,
            sums,
            given["expert_scales"],
            **where(rank, num_experts),
            tp_send_counts=none,
            x_active_mask=given["x_active_mask"],
        )

    for rank, result in enumerate(exchange.run(work)):
        given = make_tokens(rank, num_experts)
        factors = (given["expert_ids"] + 1) * given["expert_scales"]
        expected = given["x"] * factors.sum(1, keepdim=True)
        count = TOKENS - rank
        # Two products and a sum of two: a few roundings.
        torch.testing.assert_close(result[:count], expected[:count], rtol=1e-6, atol=1e-6)


def test_rows_arrive_by_expert_and_then_by_rank(exchange: Exchange) -> None:
    num_experts = 8

    def work(rank: int) -> Any:
        given = make_tokens(rank, num_experts)
        given["x"] = torch.full((TOKENS, WIDTH), float(rank))
        return dispatch(rank, num_experts, given)

    for rank, (rows, _, _, counts, sums, _, _) in enumerate(exchange.run(work)):
        per_rank = sums.diff(prepend=sums.new_zeros(1)).view(2, RANKS)
        assert torch.equal(per_rank.sum(1), counts)
        expected = torch.arange(RANKS).repeat(2).repeat_interleave(per_rank.flatten())
        assert rows[: len(expected), 0].tolist() == expected.tolist(), rank


def test_rows_are_quantized_before_they_leave(exchange: Exchange) -> None:
    num_experts = 4
    plain = exchange.run(lambda rank: dispatch(rank, 4, make_tokens(rank, 4)))
    quantized = exchange.run(lambda rank: dispatch(rank, 4, make_tokens(rank, 4), quant_mode=2))
    for (rows, _, _, counts, *_), (levels, scales, *_) in zip(plain, quantized, strict=True):
        count = int(counts.sum())
        assert levels.dtype is torch.int8
        restored = levels[:count].float() * scales[:count, None]
        # Half a level of each row.
        bound = rows[:count].abs().amax(1, keepdim=True) / 127 * 0.5001
        assert bool(((restored - rows[:count]).abs() <= bound).all())
    assert num_experts == RANKS


def test_weights_travel_with_the_rows(exchange: Exchange) -> None:
    def work(rank: int) -> Any:
        given = make_tokens(rank, 4)
        given["expert_scales"] = given["x"][:, :1].expand(-1, CHOICES).float().contiguous()
        return dispatch(rank, 4, given, expert_scales=given["expert_scales"])

    for rows, _, _, counts, _, _, weights in exchange.run(work):
        count = int(counts.sum())
        assert torch.equal(weights[:count], rows[:count, 0])


@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("num_experts", [4, 8])
def test_results_have_the_shapes_of_the_shape_functions(
    exchange: Exchange, quant_mode: int, has_weights: bool, num_experts: int
) -> None:
    def both(rank: int, on: str, run: Callable[..., Any], finish: Callable[..., Any]) -> Any:
        given = {name: t.to(on) for name, t in make_tokens(rank, num_experts).items()}
        weights = given["expert_scales"] if has_weights else None
        named = {name: given[name] for name in ("x", "expert_ids", "x_active_mask")}
        places = where(rank, num_experts)
        sent = run(**named, **places, expert_scales=weights, quant_mode=quant_mode)
        rows, _, info, _, sums, _, _ = sent
        result = finish(
            rows.float(), given["expert_ids"], info, sums, given["expert_scales"], **places
        )
        return [(tuple(t.shape), t.dtype) for t in (*sent, result)]

    meta = shapes()
    names = ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2")
    expected = both(0, "meta", *(meta[name] for name in names))

    def work(rank: int) -> Any:
        given = make_tokens(rank, num_experts)
        given["x_active_mask"][:] = True
        return both(rank, "cpu", distribute.dispatch, _combine_all)

    assert exchange.run(work) == [expected] * RANKS


def _combine_all(rows: Tensor, ids: Tensor, *rest: Any, **places: Any) -> Tensor:
    mask = torch.arange(TOKENS) < TOKENS - places["ep_rank_id"]
    return distribute.combine(rows, ids, *rest, **places, x_active_mask=mask)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quant_mode": 1}, "quant_mode must be 0 or 2"),
        ({"expert_token_nums_type": 0}, "only counts"),
        ({"global_bs": 20}, "global_bs must be 0"),
        ({"elastic_info": torch.zeros(1)}, "elastic_info is not supported"),
        ({"tp_world_size": 2}, "tp_world_size must be 0"),
    ],
)
def test_what_is_not_emulated_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dispatch(0, 4, make_tokens(0, 4), **changes)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("expert_ids", torch.zeros(TOKENS, CHOICES), "int32"),
        ("x_active_mask", torch.ones(TOKENS + 1, dtype=torch.bool), r"\[T\] bool"),
        ("x", torch.zeros(TOKENS + 1, WIDTH), "as many rows"),
        ("x", torch.zeros(TOKENS, WIDTH, dtype=torch.float64), "types"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, value: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dispatch(0, 4, make_tokens(0, 4) | {name: value})


def test_ranks_must_hold_as_many_experts_each() -> None:
    with pytest.raises(ValueError, match="as many experts each"):
        dispatch(0, 6, make_tokens(0, 6))
