"""Turns: one at a time, small ones first, nobody for ever last."""

import asyncio

import pytest

from services.worker.grammar.turns import Turns
from shared.errors import FailureReason, RequestError


class Visitors:
    """Come for a turn and write down when they have it."""

    def __init__(self, max_waiting: int = 1000) -> None:
        self.turns = Turns(max_waiting)
        self.served: list[str] = []
        self.may_go = asyncio.Event()

    async def come(self, name: str, num_bytes: int) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(self._visit(name, num_bytes))
        await asyncio.sleep(0)
        return task

    async def _visit(self, name: str, num_bytes: int) -> None:
        async with self.turns.turn(num_bytes):
            self.served.append(name)
            await self.may_go.wait()


async def test_there_is_one_at_a_time_and_small_ones_go_first() -> None:
    visitors = Visitors()
    come = [("first", 10), ("large", 100_000), ("small", 50), ("as small", 3000)]
    tasks = [await visitors.come(*each) for each in come]
    assert visitors.served == ["first"]
    visitors.may_go.set()
    await asyncio.gather(*tasks)
    assert visitors.served == ["first", "small", "as small", "large"]


async def test_a_large_one_is_passed_by_a_bounded_number() -> None:
    visitors = Visitors()
    tasks = [await visitors.come("first", 10), await visitors.come("large", 40_960)]
    tasks += [await visitors.come(f"small {n}", 10) for n in range(100)]
    visitors.may_go.set()
    await asyncio.gather(*tasks)
    assert 5 < visitors.served.index("large") < 15


async def test_beyond_the_bound_nobody_waits() -> None:
    visitors = Visitors(max_waiting=2)
    tasks = [await visitors.come(name, 1) for name in ("a", "b")]
    with pytest.raises(RequestError, match="2 constraints wait") as caught:
        await (await visitors.come("c", 1))
    assert caught.value.reason is FailureReason.QUEUE_FULL
    visitors.may_go.set()
    await asyncio.gather(*tasks)
    await (await visitors.come("c", 1))
    assert visitors.served == ["a", "b", "c"]


@pytest.mark.parametrize("is_told", [False, True])
async def test_whoever_goes_away_passes_its_turn_on(*, is_told: bool) -> None:
    visitors = Visitors()
    first, second, third = [await visitors.come(name, 1) for name in ("a", "b", "c")]
    visitors.may_go.set()
    if is_told:
        await asyncio.sleep(0)  # the first one leaves, the second one has not heard of it yet
    second.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert visitors.served == ["a", "c"]


async def test_an_error_in_a_turn_ends_it() -> None:
    turns = Turns(2)
    for _ in range(3):
        with pytest.raises(ValueError, match="wrong"):
            async with turns.turn(1):
                raise ValueError("wrong")
