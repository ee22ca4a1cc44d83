"""A replica that drains: it gets nothing new, what runs there ends, and it can be undone."""

import pytest

from services.scheduler.outlet import Outlet
from shared.errors import FailureReason, RequestError
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.engine_bench import Bench, Link, until
from tests.services.scheduler.harness import Harness, expected


def two(num_replicas: int = 2, **config: int) -> Harness:
    return Harness(capacity(), num_replicas=num_replicas, **config)


def drain(harness: Harness, replica: int = 0, *, is_draining: bool = True) -> None:
    harness.core.drain_replica(replica, harness.now, is_draining=is_draining)
    harness.check()


def live(harness: Harness) -> list[int]:
    return [harness.core.num_live_at(replica) for replica in range(len(harness.sides))]


def test_it_gets_nothing_new_and_ends_what_runs() -> None:
    harness, outlet = two(), Outlet()
    harness.submit(outlet, [5, 5], max_tokens=20)
    harness.step()
    drain(harness)
    harness.submit(outlet, [5] * 3, max_tokens=30)
    harness.step()
    assert live(harness) == [1, 4]
    while harness.core.num_live_at(0):
        harness.step()
    assert harness.core.num_live_at(1) == 3, "it ended before the others, and got none of them"
    harness.run_to_end()
    assert all(stream.end and stream.end.failure is None for stream in harness.streams.values())


def test_what_was_placed_there_and_never_ran_goes_elsewhere() -> None:
    harness, outlet = two(), Outlet()
    harness.submit(outlet, [5] * 4, max_tokens=20)
    harness.plan(0)
    assert live(harness) == [2, 2]
    drain(harness, 1)
    assert live(harness) == [2, 0]
    harness.step()
    assert live(harness) == [4, 0]
    harness.run_to_end()


def test_one_that_gave_way_with_a_plan_in_flight_ends_where_it_ran() -> None:
    """The token of that plan is still to come: elsewhere it would be computed a second time."""
    harness = Harness(capacity(num_blocks=9), num_replicas=2, max_plans_in_flight=2)
    drain(harness, 1)
    harness.submit(Outlet(), [9, 9], max_tokens=20)
    while not harness.core.load().num_preemptions_total:
        harness.plan(0)
        if harness.core.num_in_flight_at(0) == 2:
            harness.take_result(0)
    drain(harness, 1, is_draining=False)
    assert harness.core.num_in_flight_at(0)
    drain(harness, 0)
    assert live(harness) == [2, 0]
    harness.run_to_end()
    ends = [stream.end for stream in harness.streams.values()]
    assert all(end and end.stats.num_output_tokens == 20 for end in ends)


def test_what_waits_without_room_elsewhere_waits_on() -> None:
    harness, outlet = two(), Outlet()
    drain(harness)
    harness.submit(outlet, [5] * 6, max_tokens=20)
    for _ in range(3):
        harness.step()
    assert live(harness) == [0, 4]
    assert harness.core.load().num_waiting == 2
    drain(harness, is_draining=False)
    harness.step()
    assert live(harness) == [2, 4], "undone, it takes what waits though nothing else changed"
    harness.run_to_end()


def test_it_serves_on_while_no_other_replica_stands() -> None:
    harness, outlet = two(), Outlet()
    drain(harness)
    harness.lose_worker(replica=1)
    harness.submit(outlet, [5], max_tokens=20)
    harness.step()
    assert live(harness) == [1, 0]
    harness.open_epoch(1)
    harness.submit(outlet, [5], max_tokens=20)
    harness.step()
    assert live(harness) == [1, 1], "it stays so when the other one is back"
    harness.run_to_end()


def test_it_drains_on_after_its_worker_was_lost() -> None:
    harness, outlet = two(), Outlet()
    drain(harness)
    harness.lose_worker(replica=0)
    harness.open_epoch(0)
    harness.submit(outlet, [5, 5])
    harness.step()
    assert live(harness) == [0, 2]
    harness.run_to_end()


@pytest.mark.parametrize(
    ("num_replicas", "draining", "replica", "text"),
    [
        (2, (), 2, "there is no replica 2, 1 is the last"),
        (1, (), 0, "replica 0 is the last that takes requests"),
        (3, (0, 2), 1, "replica 1 is the last that takes requests"),
    ],
)
def test_what_cannot_drain_is_refused_and_serves_on(
    num_replicas: int, draining: tuple[int, ...], replica: int, text: str
) -> None:
    harness = two(num_replicas)
    for other in draining:
        drain(harness, other)
    with pytest.raises(RequestError, match=text) as failure:
        drain(harness, replica)
    assert (failure.value.reason, failure.value.field) == (
        FailureReason.INVALID_ARGUMENT,
        "replica",
    )
    harness.submit(Outlet(), [5])
    harness.run_to_end()


def test_draining_twice_is_draining_once() -> None:
    harness = two()
    for is_draining in (True, True, False, False):
        drain(harness, is_draining=is_draining)
        assert [r.is_draining for r in harness.core.load().replicas] == [is_draining, False]


async def test_operators_see_replicas_become_idle_and_take_requests_again() -> None:
    links = [Link(), Link()]
    async with Bench(links=links) as bench:
        await until(lambda: all(s.state == "ready" for s in bench.engine.replica_statuses()))
        for link in links:
            link.gate.clear()
        client = bench.client()
        for n in range(2):
            client.submit(n)
        await until(lambda: [bench.core.num_live_at(r) for r in (0, 1)] == [1, 1])
        assert bench.engine.drain_replica(0, True) == 1
        assert [s.state for s in bench.engine.replica_statuses()] == ["draining", "ready"]
        assert bench.engine.replica_statuses()[0].last_step_age_ms is None
        for link in links:
            link.gate.set()
        await client.until(lambda: len(client.ends) == 2)
        first, second = bench.engine.replica_statuses()
        assert (first.state, first.load.num_running) == ("drained", 0)
        assert first.last_step_age_ms is not None
        assert second.last_step_age_ms is not None
        assert client.tokens == {n: expected(n, 5, 8) for n in range(2)}
        assert bench.engine.drain_replica(0, False) == 0
        links[0].kill()
        await until(lambda: bench.engine.replica_statuses()[0].state == "lost")


async def test_undoing_wakes_what_waits() -> None:
    links = [Link(), Link()]
    async with Bench(links=links) as bench:
        await until(lambda: all(s.state == "ready" for s in bench.engine.replica_statuses()))
        bench.engine.drain_replica(0, True)
        links[1].gate.clear()
        client = bench.client()
        for n in range(5):
            client.submit(n)
        await until(lambda: bench.core.num_live_at(1) == 4)
        assert bench.core.num_live_at(0) == 0
        bench.engine.drain_replica(0, False)
        await client.until(lambda: client.ends)
        links[1].gate.set()
        await client.until(lambda: len(client.ends) == 5)
