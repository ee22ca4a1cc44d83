"""Orders of a leader on its way to a follower, in threads."""

import queue
from collections.abc import Callable
from typing import Any

import pytest

from services.worker.orders import EndEpoch, Epoch, LocalOrders, Order, RunPlan, StartEpoch, Stop
from services.worker.parallel.orders import FollowingOrders, LeadingOrders
from services.worker.plan import ContractError, StepPlan
from services.worker.runner import WorldLostError
from tests.services.worker.parallel.thread_groups import make_groups, run_together
from tests.services.worker.plans import make_plan


def decode(data: bytes) -> StepPlan:
    return make_plan(int.from_bytes(data[:4], "little"), {})


def run_plan(epoch: Epoch, step: int, num_bytes: int = 4) -> RunPlan:
    data = step.to_bytes(4, "little").ljust(num_bytes, b"\1")
    return RunPlan(
        epoch=epoch, plan=make_plan(step, {}), answer=lambda _: None, encode=lambda: data
    )


def pass_on(
    orders: list[Order], during: Callable[[int, Order], None] = lambda at, order: None
) -> tuple[list[Order], list[Order]]:
    """What leader and follower get until the end; `during` is called as the leader gets one."""
    leading, following = make_groups("orders", 2)
    local = LocalOrders()
    for order in [*orders, Stop()]:
        local.put(order)
    leader = LeadingOrders(local, lambda: leading)
    follower = FollowingOrders(lambda: following, decode)

    def get(rank: int) -> list[Order]:
        source: Any = follower if rank else leader
        found: list[Order] = []
        while not found or not isinstance(found[-1], Stop):
            found.append(source.get())
            if rank == 0:
                during(len(found), found[-1])
        return found

    led, followed = run_together(get, 2)
    return led, followed


def test_the_follower_gets_what_the_leader_got() -> None:
    epoch = Epoch(9, 2)
    # Plans that fit the first exchange, fill it, and need a second one.
    plans = [
        run_plan(epoch, step, size) for step, size in ((1, 4), (2, 2031), (3, 2032), (4, 9000))
    ]
    given = [StartEpoch(epoch=epoch, opened=lambda: None), *plans, EndEpoch(epoch=epoch)]
    led, followed = pass_on(given)
    assert [type(order) for order in led] == [type(order) for order in followed]
    assert [type(order) for order in led] == [type(order) for order in given] + [Stop]
    for mine, theirs in zip(led, followed, strict=True):
        if isinstance(mine, RunPlan):
            assert isinstance(theirs, RunPlan)
            assert mine.plan.step == theirs.plan.step
    starts = [order for order in followed if isinstance(order, StartEpoch)]
    assert [(order.epoch.number, order.epoch.max_plans_in_flight) for order in starts] == [(9, 2)]
    # Runners compare epochs by identity.
    assert len({id(order.epoch) for order in followed if not isinstance(order, Stop)}) == 1


def test_plans_of_an_epoch_that_the_server_ended_reach_nobody() -> None:
    old, new = Epoch(1, 1), Epoch(2, 1)
    old.is_over = True
    led, followed = pass_on(
        [
            StartEpoch(epoch=old, opened=lambda: None),
            run_plan(old, 1),
            StartEpoch(epoch=new, opened=lambda: None),
            EndEpoch(epoch=old),
            run_plan(new, 1),
        ]
    )
    assert [type(order) for order in led] == [StartEpoch, StartEpoch, RunPlan, Stop]
    assert [type(order) for order in followed] == [StartEpoch, StartEpoch, RunPlan, Stop]


def test_a_plan_that_was_passed_on_is_run_even_if_its_epoch_ends_meanwhile() -> None:
    epoch = Epoch(1, 2)

    def end_after_first_plan(at: int, order: Order) -> None:
        if at == 2:
            epoch.is_over = True
            # The runner looks at its own view, on all ranks alike.
            assert isinstance(order, RunPlan)
            assert not order.epoch.is_over

    orders: list[Order] = [StartEpoch(epoch=epoch, opened=lambda: None)]
    orders += [run_plan(epoch, 1), run_plan(epoch, 2)]
    led, followed = pass_on(orders, end_after_first_plan)
    assert [type(order) for order in led] == [StartEpoch, RunPlan, Stop]
    assert [type(order) for order in followed] == [StartEpoch, RunPlan, Stop]


def test_plans_behind_a_failed_step_reach_nobody() -> None:
    epoch = Epoch(1, 2)

    def fail_first_plan(at: int, order: Order) -> None:
        if isinstance(order, RunPlan):
            order.epoch.is_over = True  # as runners do, on all ranks

    orders: list[Order] = [StartEpoch(epoch=epoch, opened=lambda: None)]
    orders += [run_plan(epoch, 1), run_plan(epoch, 2)]
    led, followed = pass_on(orders, fail_first_plan)
    assert [type(order) for order in led] == [type(order) for order in followed]
    assert [type(order) for order in led] == [StartEpoch, RunPlan, Stop]


class Broken:
    def broadcast(self, x: Any, source: int) -> Any:
        raise RuntimeError("connection closed by peer")


def test_a_plan_that_cannot_be_read_ends_the_world() -> None:
    def refuse(data: bytes) -> StepPlan:
        raise ContractError("columns differ in length")

    leading, following = make_groups("orders", 2)
    local, epoch = LocalOrders(), Epoch(1, 1)
    for order in (StartEpoch(epoch=epoch, opened=lambda: None), run_plan(epoch, 1)):
        local.put(order)
    sources: list[Any] = [
        LeadingOrders(local, lambda: leading),
        FollowingOrders(lambda: following, refuse),
    ]

    def get(rank: int) -> str:
        try:
            for _ in range(2):
                sources[rank].get()
        except WorldLostError as error:
            return str(error)
        return ""

    said = "a plan of the leader cannot be read: columns differ in length"
    assert run_together(get, 2) == ["", said]


def test_a_broken_exchange_of_orders_ends_the_world() -> None:
    group: Any = Broken()
    source: queue.SimpleQueue[Order] = queue.SimpleQueue()
    source.put(Stop())
    with pytest.raises(WorldLostError, match="connection closed"):
        LeadingOrders(source, lambda: group).get()
    with pytest.raises(WorldLostError, match="connection closed"):
        FollowingOrders(lambda: group, decode).get()
