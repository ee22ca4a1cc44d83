"""The loop: plans out, results back, epochs opened again; with a link in memory."""

import asyncio
import dataclasses
import time
from itertools import pairwise

import pytest

from services.scheduler.cache_events import CacheChange
from services.scheduler.engine import TICK_S
from services.scheduler.plan import StepResult, WorkerContractError
from services.scheduler.sequence import SequenceState
from shared import tracing
from shared.endings import AbortReason
from shared.errors import FailureReason
from shared.sampling import LoadSnapshot, SamplingSpec
from tests.services.scheduler.builders import capacity, entry, submission
from tests.services.scheduler.engine_bench import Bench, Link, Session, StillClock, until
from tests.services.scheduler.harness import expected


@pytest.mark.parametrize("window", [1, 2])
async def test_requests_run_to_their_end(window: int) -> None:
    async with Bench(window=window) as bench:
        client = bench.client()
        for n in range(10):
            assert client.submit(n) is None
        await client.until(lambda: len(client.ends) == 10)
        assert client.tokens == {n: expected(n, 5, 8) for n in range(10)}
        assert bench.link.sessions[0].max_in_flight <= window


async def test_new_work_does_not_wait_for_a_result_when_the_window_has_room() -> None:
    async with Bench(window=2) as bench:
        bench.link.gate.clear()
        client = bench.client()
        client.submit(0)
        await until(lambda: bench.core.num_in_flight == 2)
        bench.link.gate.set()
        await client.until(lambda: client.ends)


async def test_a_lost_worker_that_comes_back_in_time_resumes_every_stream() -> None:
    async with Bench(grace_s=30.0) as bench:
        bench.link.gate.clear()
        client = bench.client()
        client.submit(0)
        await until(lambda: bench.core.num_in_flight)
        bench.link.kill()
        await bench.until_reason(bool)
        assert bench.reasons[-1].startswith("no worker: the stream broke; last step 1")
        assert client.submit(1) is None, "within the grace requests wait"
        bench.link.is_up = True
        bench.link.gate.set()
        await client.until(lambda: len(client.ends) == 2)
        assert client.tokens == {n: expected(n, 5, 8) for n in (0, 1)}
        assert bench.link.sessions[0].is_closed
        assert bench.reasons[-1] == ""


async def test_without_a_worker_everything_fails_after_the_grace() -> None:
    async with Bench(grace_s=0.2) as bench:
        bench.link.gate.clear()
        client = bench.client()
        client.submit(0)
        await until(lambda: bench.core.num_in_flight)
        started = asyncio.get_running_loop().time()
        bench.link.kill()
        await client.until(lambda: client.ends)
        assert asyncio.get_running_loop().time() - started < 5.0
        failure = client.ends[0].failure
        assert failure is not None
        assert failure.reason is FailureReason.UPSTREAM_LOST
        assert failure.may_go_on, "nothing says that it was the sequence's fault"
        refusal = client.submit(1)
        assert refusal is not None
        assert refusal.reason is FailureReason.UPSTREAM_LOST
        bench.link.is_up = True
        bench.link.gate.set()
        await bench.until_reason(lambda reason: not reason)
        assert client.submit(2) is None
        await client.until(lambda: 2 in client.ends)


async def test_a_broken_contract_fails_what_was_running_and_opens_a_new_epoch() -> None:
    def twist(result: StepResult) -> None:
        result.num_computed_tokens[0] += 1

    async with Bench(grace_s=30.0) as bench:
        bench.link.twist = twist
        client = bench.client()
        client.submit(0)
        await client.until(lambda: client.ends)
        failure = client.ends[0].failure
        assert failure is not None
        assert failure.reason is FailureReason.UPSTREAM_LOST
        assert "broke the step protocol" in failure.message
        bench.link.twist = lambda _: None
        client.submit(1)
        await client.until(lambda: 1 in client.ends)
        assert client.tokens[1] == expected(1, 5, 8)
        assert bench.link.num_opened == 2


async def test_a_step_without_a_result_ends_the_epoch_and_is_named() -> None:
    clock = StillClock()
    async with Bench(step_timeout_s=0.1, grace_s=3.0, clock=clock) as bench:
        bench.link.gate.clear()
        client = bench.client()
        client.submit(0)
        await until(lambda: bench.core.num_in_flight)
        clock.now += 0.2
        await bench.until_reason(bool)
        assert "step 1 has had no result for 0.1 s" in bench.reasons[-1]
        bench.link.gate.set()
        await client.until(lambda: client.ends)
        assert client.tokens[0] == expected(0, 5, 8)


async def test_an_idle_epoch_has_no_step_to_time() -> None:
    clock = StillClock()
    async with Bench(step_timeout_s=0.3, clock=clock) as bench:
        for num_ends in (0, 1):
            clock.now += 0.5
            await asyncio.sleep(0.3)  # steps are looked at meanwhile
            client = bench.client()
            client.submit(num_ends)
            await client.until(lambda: client.ends)  # noqa: B023  # of this turn
        clock.now += 0.5
        await asyncio.sleep(0.3)
        assert bench.link.num_opened == 1


async def test_deadlines_are_kept_while_the_worker_stands_still() -> None:
    async with Bench() as bench:
        bench.link.gate.clear()
        client = bench.client()
        client.submit(0, timeout_ms=50)
        await client.until(lambda: client.ends)
        failure = client.ends[0].failure
        assert failure is not None
        assert failure.reason is FailureReason.DEADLINE_EXCEEDED
        bench.link.gate.set()


async def test_aborts_reach_the_client_without_a_step() -> None:
    async with Bench() as bench:
        bench.link.gate.clear()
        client = bench.client()
        client.submit(0)
        client.submit(1)
        bench.engine.abort(client.outlet, 0, AbortReason.CANCELLED, 0)
        assert bench.engine.abort_request("r1") == 1
        await client.until(lambda: len(client.ends) == 2)
        bench.link.gate.set()


async def test_a_drained_engine_refuses_and_says_so() -> None:
    async with Bench() as bench:
        client = bench.client()
        client.submit(0)
        bench.engine.drain()
        refusal = client.submit(1)
        assert refusal is not None
        assert refusal.reason is FailureReason.DRAINING
        await client.until(lambda: 0 in client.ends)
        assert client.tokens[0] == expected(0, 5, 8)
        assert bench.reasons[-1] == "draining"


async def test_the_load_is_told_at_once_and_at_every_change() -> None:
    async with Bench() as bench:
        bench.link.gate.clear()
        loads: list[LoadSnapshot] = []

        async def follow() -> None:
            async for load in bench.engine.watch_load():
                loads.append(load)

        task = asyncio.create_task(follow())
        await until(lambda: loads)
        assert loads[0].is_worker_ready
        await asyncio.sleep(3 * TICK_S)
        num_idle, started = len(loads), time.monotonic()
        client = bench.client()
        client.submit(0)
        await until(lambda: loads[-1].num_running == 1)
        bench.link.gate.set()
        await until(lambda: loads[-1].num_output_tokens_total == 8)
        assert loads[-1].num_running == 0
        assert len(loads) - num_idle <= 1 + (time.monotonic() - started) / TICK_S
        assert all(before != after for before, after in pairwise(loads))
        task.cancel()


async def test_a_traced_request_leaves_three_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[tuple[str, str]] = []

    def start(name: str, *, traceparent: str, **_: object) -> tracing.PassingSpan:
        names.append((name, traceparent))
        return tracing.PassingSpan(traceparent)

    monkeypatch.setattr(tracing, "is_enabled", lambda: True)
    monkeypatch.setattr(tracing, "start_span", start)
    async with Bench() as bench:
        client = bench.client()
        client.submit(0, traceparent="00-a-b-01")
        client.submit(1)
        await client.until(lambda: len(client.ends) == 2)
    assert names == [(name, "00-a-b-01") for name in ("queue", "prefill", "decode")]


async def test_a_new_watcher_takes_no_change_from_another() -> None:
    async with Bench() as bench:
        first, second = bench.engine.watch_load(), bench.engine.watch_load()
        await anext(first)
        client = bench.client()
        client.submit(0)
        await client.until(lambda: client.ends)
        assert (await anext(second)).num_output_tokens_total == 8
        async with asyncio.timeout(30):
            while (await anext(first)).num_output_tokens_total != 8:
                pass


async def test_work_that_is_never_planned_ends_the_epoch() -> None:
    """No known way leads there; if one does, health says so instead of staying green."""
    async with Bench(step_timeout_s=0.1, grace_s=5.0) as bench:
        bench.core.plan = lambda now, replica, **_: None  # type: ignore[method-assign]
        bench.client().submit(0)
        await bench.until_reason(lambda reason: "no step was planned" in reason)


async def test_a_drained_engine_stays_so_when_the_worker_comes_back() -> None:
    async with Bench(grace_s=5.0) as bench:
        bench.engine.drain()
        bench.link.kill()
        await bench.until_reason(lambda reason: reason.startswith("no worker"))
        bench.link.is_up = True
        await bench.until_reason(lambda reason: reason == "draining")


async def test_a_sink_that_breaks_stops_the_engine_and_is_not_swallowed() -> None:
    bench = Bench()
    async with bench:
        outlet = bench.engine.open_outlet(lambda delivery: 1 / 0)  # type: ignore[arg-type,return-value]
        bench.engine.submit(submission(), outlet)
        await asyncio.wait({bench.task}, timeout=30)
        assert isinstance(bench.task.exception(), BaseExceptionGroup)


async def test_our_own_broken_invariant_stops_the_engine() -> None:
    bench = Bench()
    async with bench:
        bench.core.plan = lambda now, replica: 1 / 0  # type: ignore[assignment,return-value,misc]
        bench.client().submit(0)
        await asyncio.wait({bench.task}, timeout=30)
        assert isinstance(bench.task.exception(), BaseExceptionGroup)


async def test_a_worker_with_an_impossible_capacity_is_not_used() -> None:
    bench = Bench()

    async def open_badly(max_plans_in_flight: int) -> Session:
        raise WorkerContractError("capacity num_blocks is 0")

    bench.link.open = open_badly  # type: ignore[method-assign]
    bench.link.is_up = False
    async with bench:
        await bench.until_reason(lambda reason: "num_blocks is 0" in reason)


async def test_blocks_are_named_while_the_worker_computes() -> None:
    async with Bench() as bench:
        client = bench.client()
        client.submit(0, sampling=SamplingSpec(max_tokens=30))
        await client.until(lambda: client.tokens[0])
        bench.link.gate.clear()
        # No plan and no lookup comes after that result: the loop does it by itself.
        await until(lambda: bench.core.load().num_cached_blocks >= 1)
        bench.link.gate.set()


async def test_a_long_waiting_prompt_is_looked_up_before_its_turn() -> None:
    links = [Link(capacity(num_blocks=400, max_num_seqs=1, max_model_len=1600))]
    async with Bench(links=links) as bench:
        client = bench.client()
        long = submission(entry(1200, stream_id=0), request_id="long")
        bench.engine.submit(long, client.outlet)
        client.tokens[0] = []
        await client.until(lambda: client.ends)
        bench.link.gate.clear()
        client.submit(1)
        await until(lambda: bench.core.num_in_flight)
        again = dataclasses.replace(long, request_id="again")
        client.tokens[0] = []
        bench.engine.submit(again, client.outlet)
        waiting = client.outlet.sequences[0]
        await until(lambda: waiting.found is not None and len(waiting.found.blocks) == 299)
        assert waiting.state is SequenceState.WAITING
        bench.link.gate.set()
        await client.until(lambda: len(client.ends) == 2 and not client.outlet.sequences)


async def test_a_follower_of_the_caches_is_told_as_it_comes() -> None:
    async with Bench() as bench:
        updates = bench.engine.watch_cache(None)
        first = await anext(updates)
        assert (first.snapshot, first.number) == ([], 0)
        client = bench.client()
        client.submit(0, sampling=SamplingSpec(max_tokens=30))
        async with asyncio.timeout(30):
            second = await anext(updates)
        assert [event.number for event in second.events] == list(range(1, second.number + 1))
        await client.until(lambda: client.ends)
        assert bench.engine.reset_prefix_cache() > 0
        async with asyncio.timeout(30):
            while second.events[-1].change is not CacheChange.CLEARED:
                second = await anext(updates)
        assert bench.engine.block_naming == ("", 4)
