"""Several workers: replicas of their own, and worlds whose replicas step together."""

import asyncio
import dataclasses

import pytest

from shared.errors import FailureReason
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.engine_bench import Bench, Link, StillClock, until
from tests.services.scheduler.harness import expected


def replicas() -> list[Link]:
    return [Link(), Link()]


def world() -> list[Link]:
    return [
        Link(
            dataclasses.replace(
                capacity(), data_parallel_size=2, data_parallel_rank=rank, moe_methods=((64, 1),)
            )
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("is_joint", [False, True])
async def test_requests_are_spread_over_replicas_and_run_to_their_end(
    window: int, is_joint: bool
) -> None:
    links = world() if is_joint else replicas()
    async with Bench(window=window, links=links, is_joint=is_joint) as bench:
        client = bench.client()
        for n in range(12):
            assert client.submit(n) is None
        await client.until(lambda: len(client.ends) == 12)
        assert client.tokens == {n: expected(n, 5, 8) for n in range(12)}
        steps = [link.sessions[0].worker.step for link in links]
        assert min(steps) > 0
        assert not is_joint or steps[0] == steps[1]


@pytest.mark.parametrize("is_joint", [False, True])
async def test_workers_at_rest_hold_no_row_of_a_client_that_left(is_joint: bool) -> None:
    links = world() if is_joint else [Link()]
    async with Bench(links=links, is_joint=is_joint) as bench:
        bench.link.gate.clear()
        client = bench.client()
        client.submit(0)
        await until(lambda: bench.core.num_in_flight)
        bench.engine.close_outlet(client.outlet)
        bench.link.gate.set()
        worker = links[0].sessions[0].worker
        await until(lambda: worker.step > 1 and not worker.rows)
        num_steps = worker.step
        await asyncio.sleep(0.3)
        assert worker.step == num_steps, "once said is enough"


async def test_a_replica_that_waits_does_not_hold_up_the_other() -> None:
    async with Bench(links=replicas()) as bench:
        await asyncio.sleep(0)
        bench.links[0].gate.clear()
        client = bench.client()
        for n in range(2):
            client.submit(n)
        await client.until(lambda: client.ends)
        assert len(client.ends) == 1
        bench.links[0].gate.set()
        await client.until(lambda: len(client.ends) == 2)


async def test_the_streams_of_a_lost_replica_go_on_at_the_other() -> None:
    async with Bench(links=replicas(), grace_s=0.2) as bench:
        bench.links[0].gate.clear()
        client = bench.client()
        for n in range(2):
            client.submit(n)
        await client.until(lambda: client.ends)
        bench.links[0].kill()
        await client.until(lambda: len(client.ends) == 2)
        assert client.tokens == {n: expected(n, 5, 8) for n in (0, 1)}
        await asyncio.sleep(0.4)  # past the grace: one replica is enough to serve
        assert bench.reasons[-1] == ""
        client.submit(2)
        await client.until(lambda: 2 in client.ends)
        bench.links[1].kill()
        await bench.until_reason(lambda reason: reason.startswith("no worker"))
        bench.links[0].is_up = True
        bench.links[0].gate.set()
        await bench.until_reason(lambda reason: not reason)


async def test_a_world_that_loses_one_replica_ends_at_all_of_them_and_resumes() -> None:
    links = world()
    async with Bench(links=links, is_joint=True, grace_s=30.0) as bench:
        links[1].gate.clear()
        client = bench.client()
        client.submit(0)
        client.submit(1)
        await until(lambda: bench.core.num_in_flight)
        links[1].kill()
        await bench.until_reason(lambda reason: reason.startswith("no worker"))
        assert links[0].sessions[0].is_closed
        links[1].is_up = True
        links[1].gate.set()
        await client.until(lambda: len(client.ends) == 2)
        assert client.tokens == {n: expected(n, 5, 8) for n in (0, 1)}
        assert links[0].num_opened >= 2


async def test_a_step_that_one_replica_of_a_world_does_not_answer_names_it() -> None:
    links, clock = world(), StillClock()
    async with Bench(
        links=links, is_joint=True, step_timeout_s=0.1, grace_s=5.0, clock=clock
    ) as bench:
        links[1].gate.clear()
        client = bench.client()
        client.submit(0)
        await until(lambda: bench.engine._worlds[0]._silent == {1})
        clock.now += 0.2
        await bench.until_reason(bool)
        assert "step 1 of replica 1 has had no result for 0.1 s" in bench.reasons[-1]
        links[1].gate.set()
        await client.until(lambda: client.ends)


async def test_workers_that_are_no_world_are_not_used() -> None:
    bench = Bench(links=world()[::-1], is_joint=True)
    for link in bench.links:
        link.is_up = False
    async with bench:
        for link in bench.links:
            link.is_up = True
        await bench.until_reason(bool)
        refusal = bench.client().submit(0)
        assert refusal is not None
        assert refusal.reason is FailureReason.UPSTREAM_LOST
        assert all(session.is_closed for link in bench.links for session in link.sessions)
