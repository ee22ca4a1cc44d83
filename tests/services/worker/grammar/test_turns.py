"""Turns: one at a time, small ones first, nobody for ever last."""

import asyncio

import pytest

from services.worker.grammar.turns import Turns
from shared.errors import FailureReason, RequestError


class Visitors:
    """Come for a turn, write down when they have it, and take a second of a clock for it."""

    def __init__(self, max_present: int = 1000) -> None:
        self.now = 0.0
        self.turns = Turns(max_present, lambda: self.now)
        self.served: list[str] = []
        self.may_go = asyncio.Event()

    async def come(
        self, name: str, num_bytes: int, tenant: str = "", seconds: float = 1.0
    ) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(self._visit(name, num_bytes, tenant, seconds))
        await asyncio.sleep(0)
        return task

    async def _visit(self, name: str, num_bytes: int, tenant: str, seconds: float) -> None:
        async with self.turns.turn(tenant, num_bytes):
            self.served.append(name)
            await self.may_go.wait()
            self.now += seconds


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


async def test_tenants_take_turns_by_the_time_that_theirs_took() -> None:
    visitors = Visitors()
    tasks = [await visitors.come("first", 10, "x")]
    tasks += [await visitors.come(f"a{n}", 10, "a") for n in range(6)]
    tasks += [await visitors.come(f"b{n}", 10, "b", seconds=3.0) for n in range(2)]
    visitors.may_go.set()
    await asyncio.gather(*tasks)
    assert visitors.served == ["first", "a0", "b0", "a1", "a2", "a3", "b1", "a4", "a5"]


async def test_a_tenant_that_comes_later_takes_turns_and_has_no_credit_for_its_absence() -> None:
    visitors = Visitors()
    tasks = [await visitors.come(f"a{n}", 10, "a") for n in range(4)]
    visitors.may_go.set()
    visitors.may_go.clear()
    await tasks[0]
    tasks += [await visitors.come(f"b{n}", 1_000_000, "b") for n in range(2)]
    visitors.may_go.set()
    await asyncio.gather(*tasks)
    assert visitors.served == ["a0", "a1", "b0", "a2", "b1", "a3"]


async def test_who_has_most_there_gives_a_place_up_for_a_tenant_with_fewer() -> None:
    visitors = Visitors(max_present=5)
    many = [await visitors.come(f"a{n}", 10, "a") for n in range(5)]
    assert not any(task.done() for task in many)
    few = [await visitors.come(f"b{n}", 10, "b") for n in range(2)]
    for task in (many[4], many[3]):
        with pytest.raises(RequestError, match="5 constraints wait") as caught:
            await task
        assert caught.value.reason is FailureReason.QUEUE_FULL
    # Now each has two that wait.
    with pytest.raises(RequestError, match="5 constraints wait"):
        await (await visitors.come("b2", 10, "b"))
    with pytest.raises(RequestError, match="5 constraints wait"):
        await (await visitors.come("a5", 10, "a"))
    visitors.may_go.set()
    await asyncio.gather(*many[:3], *few)
    assert visitors.served == ["a0", "b0", "a1", "b1", "a2"]


async def test_of_a_tenants_own_the_largest_gives_its_place_up() -> None:
    visitors = Visitors(max_present=4)
    sizes = {"first": 1, "large": 1_000_000, "small": 1, "smaller": 1}
    tasks = {name: await visitors.come(name, size, "a") for name, size in sizes.items()}
    other = await visitors.come("other", 1, "b")
    with pytest.raises(RequestError):
        await tasks.pop("large")
    visitors.may_go.set()
    await asyncio.gather(other, *tasks.values())


@pytest.mark.parametrize("is_first_gone", [True, False])
async def test_one_that_goes_away_in_the_turn_in_which_another_comes_leaves_the_turns_whole(
    *, is_first_gone: bool
) -> None:
    visitors = Visitors(max_present=4)
    loop = asyncio.get_running_loop()
    many = [await visitors.come(f"a{n}", 10, "a") for n in range(4)]
    other = loop.create_task(visitors._visit("b", 10, "b", 1.0))
    if is_first_gone:
        many[3].cancel()
    else:
        loop.call_soon(many[3].cancel)
    for _ in range(3):
        await asyncio.sleep(0)
    assert visitors.served == ["a0"]
    visitors.may_go.set()
    done = await asyncio.gather(*many, other, return_exceptions=True)
    assert visitors.served == ["a0", "b", "a1", "a2"]
    assert [type(each) for each in done] == [
        *[type(None)] * 3,
        asyncio.CancelledError,
        type(None),
    ]
    await (await visitors.come("later", 10, "a"))
    assert visitors.served[-1] == "later"


async def test_who_goes_away_in_this_turn_has_no_place_any_more() -> None:
    visitors = Visitors(max_present=3)
    a0, a1, a2 = [await visitors.come(f"a{n}", 10, "a") for n in range(3)]
    b = asyncio.get_running_loop().create_task(visitors._visit("a3", 10, "a", 1.0))
    a2.cancel()  # and it has not heard of that when the other comes
    visitors.may_go.set()
    await asyncio.gather(a0, a1, a2, b, return_exceptions=True)
    assert visitors.served == ["a0", "a1", "a3"]


async def test_beyond_the_bound_nobody_waits() -> None:
    visitors = Visitors(max_present=2)
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
            async with turns.turn("", 1):
                raise ValueError("wrong")
