"""Several detokenizers behind one gateway, fake ones on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from protos.glm.v1 import common_pb2
from services.frontend import detokenizers as module
from services.frontend.detokenizers import Detokenizers
from services.frontend.exchange import Exchange
from services.frontend.resubmission import MAX_LOSSES, ResubmitBounds
from services.frontend.submission import ObjectKind, OutputPlan, SequencePlan, Submission
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec
from tests.services.frontend.fake_detokenizer import TEXT, Behaviour, FakeDetokenizer
from tests.services.frontend.waits import until

SILENT = Behaviour(silent_after=0)


def submission(request_id: str = "r", *, n: int = 1, is_stream: bool = True) -> Submission:
    return Submission(
        request_id=request_id,
        sequences=tuple(
            SequencePlan(index=i, prompt_token_ids=[1, 2, 3], seed=40 + i) for i in range(n)
        ),
        sampling=SamplingSpec(seed=40),
        output=OutputPlan(
            object_kind=ObjectKind.CHAT_COMPLETION,
            response_id=request_id,
            model="m",
            created_s=1,
            is_stream=is_stream,
        ),
        timeout_ms=60_000,
    )


@asynccontextmanager
async def connected(
    fakes: Sequence[FakeDetokenizer],
    bounds: ResubmitBounds | None = None,
    *,
    silence_s: float = 5.0,
) -> AsyncIterator[Detokenizers]:
    """A pool; `causes` counts what was submitted again."""
    causes: list[str] = []
    pool = Detokenizers(
        [fake.address for fake in fakes],
        credit_bytes=1000,
        bounds=bounds or ResubmitBounds(timeout_s=60.0),
        silence_s=silence_s,
        on_resubmit=causes.append,
    )
    pool.causes = causes  # type: ignore[attr-defined]
    task = asyncio.create_task(pool.run())
    await until(lambda: pool.num_ready == sum(fake._server is not None for fake in fakes))
    yield pool
    task.cancel()
    await asyncio.wait({task})


@pytest.fixture
async def fakes(run_dir: Path) -> AsyncIterator[list[FakeDetokenizer]]:
    """Two that stay silent."""
    made = [FakeDetokenizer(f"unix:{run_dir}/d{i}.sock") for i in range(2)]
    for fake in made:
        fake.behaviour = SILENT
        await fake.start()
    yield made
    for fake in made:
        await fake.stop()


def sizes(fakes: Sequence[FakeDetokenizer]) -> list[int]:
    return [len(fake.submits) for fake in fakes]


async def admitted(pool: Detokenizers, *submissions: Submission) -> list[Exchange]:
    exchanges = [pool.submit(one) for one in submissions]
    for exchange in exchanges:
        await exchange.wait_for_verdict()
    return exchanges


async def test_requests_go_to_the_one_with_the_least_in_flight(
    fakes: list[FakeDetokenizer],
) -> None:
    async with connected(fakes) as pool:
        (wide,) = await admitted(pool, submission("wide", n=4))
        full = 0 if fakes[0].submits else 1
        exchanges = await admitted(pool, *(submission(f"r{i}") for i in range(4)))
        # Sequences count, not requests: four of one weigh as much as four requests.
        assert sizes(fakes)[full] == 1
        assert sizes(fakes)[1 - full] == 4
        await admitted(pool, submission("a"), submission("b"))
        assert sorted(sizes(fakes)) == [2, 5]
        pool.close(wide)
        await admitted(pool, *(submission(f"s{i}") for i in range(4)))
        assert sizes(fakes)[full] == 6
        assert pool.num_open == 10
        for exchange in exchanges:
            pool.close(exchange)
        assert pool.num_open == 6


async def test_one_that_drains_or_is_away_takes_nothing(fakes: list[FakeDetokenizer]) -> None:
    async with connected(fakes) as pool:
        fakes[0].drain()
        await until(lambda: pool.num_ready == 1)
        await admitted(pool, *(submission(f"r{i}") for i in range(3)))
        assert sizes(fakes) == [0, 3]
        await fakes[1].stop()
        await until(lambda: pool.num_ready == 0)
        assert pool.is_draining
        assert pool.is_connected


async def test_one_without_a_chain_behind_it_takes_nothing(fakes: list[FakeDetokenizer]) -> None:
    async with connected(fakes) as pool:
        fakes[0].say(load=common_pb2.LoadSnapshot())
        await until(lambda: pool.num_ready == 1)
        await admitted(pool, *(submission(f"r{i}") for i in range(3)))
        assert sizes(fakes) == [0, 3]
        assert pool.max_model_len == pool.load.max_model_len == 8192


async def test_counters_do_not_go_up_and_down_between_detokenizers(
    fakes: list[FakeDetokenizer],
) -> None:
    """The second one began to add up later; each counts its own losses."""
    fakes[1].load.num_preemptions_total = 2
    async with connected(fakes) as pool:
        before = pool.load
        counts = {"num_scheduler_losses_total": 2, "num_resubmissions_total": 5}
        preemptions = (7 + 30, 2 + 30)
        for fake, number in zip(fakes, preemptions, strict=True):
            load = common_pb2.LoadSnapshot(num_unresumed_total=1, is_worker_ready=True, **counts)
            load.num_preemptions_total = number
            fake.say(load=load)
        await until(lambda: pool.load.num_unresumed_total == 2)
        assert pool.load.num_preemptions_total == before.num_preemptions_total + 30
        assert pool.load.num_scheduler_losses_total == 4
        assert pool.load.num_resubmissions_total == 10
        shown = pool.load.num_preemptions_total
        source = pool._counted._source
        assert source is not None
        await fakes[source].stop()
        await until(lambda: not pool.clients[source].is_connected)
        assert pool.load.num_preemptions_total == shown
        assert pool.load.step_us_total == before.step_us_total
        load.num_preemptions_total = preemptions[1 - source] + 9
        fakes[1 - source].say(load=load)
        await until(lambda: pool.load.num_preemptions_total == shown + 9)
        assert pool.load.num_scheduler_losses_total == 4


async def test_without_any_a_request_is_refused_at_once(run_dir: Path) -> None:
    fake = FakeDetokenizer(f"unix:{run_dir}/none.sock")
    async with connected([fake]) as pool:
        with pytest.raises(RequestError) as caught:
            pool.submit(submission())
        assert caught.value.reason is FailureReason.UPSTREAM_LOST
        assert pool.num_kept_bytes == pool.num_open == 0


@pytest.mark.parametrize("is_admitted", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_of_a_lost_one_goes_to_the_other(
    fakes: list[FakeDetokenizer], is_stream: bool, is_admitted: bool
) -> None:
    for fake in fakes:
        fake.behaviour = Behaviour(silent_after=0, gives_verdict=is_admitted)
    async with connected(fakes) as pool:
        exchange = pool.submit(submission(is_stream=is_stream))
        await until(lambda: sum(sizes(fakes)) == 1)
        first = sizes(fakes).index(1)
        if is_admitted:
            await exchange.wait_for_verdict()
        fakes[1 - first].behaviour = Behaviour()
        await fakes[first].stop()
        await exchange.wait_for_verdict()
        answer = await exchange.wait_for_end()
        assert (b"[DONE]" if is_stream else TEXT.encode()) in answer
        old, new = fakes[first].submits[0].submit, fakes[1 - first].submits[0].submit
        assert (old.attempt, new.attempt) == (0, 1)
        assert 0 < new.timeout_ms <= old.timeout_ms
        new.attempt, new.timeout_ms = old.attempt, old.timeout_ms
        assert new == old
        assert pool.causes == ["lost"]  # type: ignore[attr-defined]
        pool.close(exchange)
        assert pool.num_kept_bytes == 0


async def test_what_came_before_the_loss_and_waits_here_is_dropped(
    fakes: list[FakeDetokenizer],
) -> None:
    for fake in fakes:
        fake.behaviour = Behaviour(silent_after=2)
    async with connected(fakes) as pool:
        (exchange,) = await admitted(pool, submission())
        first = sizes(fakes).index(1)
        await until(lambda: len(exchange._pieces) == 2)
        fakes[1 - first].behaviour = Behaviour()
        await fakes[first].stop()
        assert (await exchange.wait_for_end()).count(b'"Hel"') == 1


async def test_a_stream_that_began_is_not_begun_again(fakes: list[FakeDetokenizer]) -> None:
    for fake in fakes:
        fake.behaviour = Behaviour(silent_after=1)
    async with connected(fakes) as pool:
        (exchange,) = await admitted(pool, submission())
        await exchange.wait()
        pool.give_credit(exchange, len(exchange.take()))
        assert pool.num_kept_bytes == 0
        await fakes[sizes(fakes).index(1)].stop()
        with pytest.raises(RequestError) as caught:
            await exchange.wait_for_end()
        assert caught.value.reason is FailureReason.UPSTREAM_LOST
        assert sum(sizes(fakes)) == 1


async def test_the_only_one_is_waited_for(fakes: list[FakeDetokenizer]) -> None:
    async with connected(fakes[:1]) as pool:
        (exchange,) = await admitted(pool, submission())
        await fakes[0].stop()
        await until(lambda: pool.num_open == 1 and not pool.is_connected)
        fakes[0].behaviour = Behaviour()
        await fakes[0].start()
        assert b"[DONE]" in await exchange.wait_for_end()


async def test_a_wait_has_an_end(fakes: list[FakeDetokenizer]) -> None:
    async with connected(fakes[:1], ResubmitBounds(timeout_s=0.3)) as pool:
        (exchange,) = await admitted(pool, submission())
        await fakes[0].stop()
        async with asyncio.timeout(30):
            with pytest.raises(RequestError, match="connection to the detokenizer was lost"):
                await exchange.wait_for_end()
        assert pool.num_open == 0


async def error_of(exchange: Exchange) -> tuple[FailureReason, str]:
    """Its bad end, which must come before any wait for a detokenizer is over."""
    async with asyncio.timeout(30):
        with pytest.raises(RequestError) as caught:
            await exchange.wait_for_end()
    return caught.value.reason, caught.value.message


LATE_LIMITS = [
    ({"first_token_timeout_ms": 700}, "no token came within 700 ms"),
    ({"timeout_ms": 700}, "it did not end within 700 ms"),
]


@pytest.mark.parametrize(("limits", "text"), LATE_LIMITS)
async def test_limits_are_kept_while_no_detokenizer_is_there(
    fakes: list[FakeDetokenizer], limits: dict[str, int], text: str
) -> None:
    async with connected(fakes[:1]) as pool:
        (exchange,) = await admitted(pool, replace(submission(), **limits))
        await fakes[0].stop()
        reason, message = await error_of(exchange)
        assert reason is FailureReason.DEADLINE_EXCEEDED
        assert message.endswith(text)
        assert pool.num_open == 0


@pytest.mark.parametrize(("limits", "text"), LATE_LIMITS)
async def test_limits_are_kept_where_the_detokenizer_stands_still(
    fakes: list[FakeDetokenizer], limits: dict[str, int], text: str
) -> None:
    fakes[0].behaviour = Behaviour(gives_verdict=False)
    async with connected(fakes[:1]) as pool:
        exchange = pool.submit(replace(submission(), **limits))
        reason, message = await error_of(exchange)
        assert reason is FailureReason.DEADLINE_EXCEEDED
        assert message.endswith(text)


async def test_after_a_move_an_end_by_time_names_the_limit_of_the_request(
    fakes: list[FakeDetokenizer],
) -> None:
    late = common_pb2.Failure(
        reason=common_pb2.FAILURE_REASON_DEADLINE_EXCEEDED,
        message="no first token within 123 ms",
        field="first_token_timeout_ms",
    )
    async with connected(fakes) as pool:
        (exchange,) = await admitted(pool, replace(submission(), first_token_timeout_ms=9_000))
        first = sizes(fakes).index(1)
        fakes[1 - first].behaviour = Behaviour(failure_after=0, failure=late)
        await fakes[first].stop()
        _, message = await error_of(exchange)
        assert message.endswith("no token came within 9000 ms")


async def test_a_request_that_loses_them_all_is_given_up(fakes: list[FakeDetokenizer]) -> None:
    async with connected(fakes[:1]) as pool:
        (exchange,) = await admitted(pool, submission())
        for number in range(MAX_LOSSES + 1):
            await until(lambda number=number: sizes(fakes)[0] == number + 1)
            assert not exchange.is_ended
            await fakes[0].stop()
            await fakes[0].start()
        await until(lambda: exchange.is_ended)
        assert sizes(fakes)[0] == MAX_LOSSES + 1
        assert [submit.submit.attempt for submit in fakes[0].submits] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("reason", "is_moved"),
    [("DRAINING", True), ("UPSTREAM_LOST", True), ("QUEUE_FULL", False), ("INTERNAL", False)],
)
async def test_a_refusal_that_another_would_not_give_is_no_answer(
    fakes: list[FakeDetokenizer], reason: str, is_moved: bool
) -> None:
    refusal = common_pb2.Failure(reason=f"FAILURE_REASON_{reason}", message="no")
    for fake in fakes:
        fake.behaviour = Behaviour(refusal=refusal)
    async with connected(fakes) as pool:
        exchange = pool.submit(submission())
        with pytest.raises(RequestError, match="no"):
            await exchange.wait_for_verdict()
        assert sum(sizes(fakes)) == 1 + is_moved
        assert pool.causes == ["refused"] * is_moved  # type: ignore[attr-defined]


async def test_who_was_lost_waits_out_refusals_of_a_mesh_that_recovers(
    fakes: list[FakeDetokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    full = common_pb2.Failure(reason=common_pb2.FAILURE_REASON_QUEUE_FULL, message="full")
    async with connected(fakes[:1]) as pool:
        (exchange,) = await admitted(pool, submission())
        await fakes[0].stop()
        fakes[0].behaviour = Behaviour(refusal=full)
        await fakes[0].start()
        await until(lambda: sizes(fakes)[0] >= 3)
        assert not exchange.is_ended
        fakes[0].behaviour = Behaviour()
        assert b"[DONE]" in await exchange.wait_for_end()


async def test_one_that_promised_to_speak_and_says_nothing_is_lost(
    fakes: list[FakeDetokenizer],
) -> None:
    fakes[0].sign_interval_ms = 100
    async with connected(fakes, silence_s=0.6) as pool:
        exchanges = await admitted(pool, submission("a"), submission("b"))
        found = {exchange.request_id: exchange for exchange in exchanges}
        moved, kept = (found[fake.submits[0].submit.request_id] for fake in fakes)
        fakes[1].behaviour = Behaviour()
        assert b"[DONE]" in await moved.wait_for_end()
        # The other one promised nothing: its silence is no sign of anything.
        await asyncio.sleep(0.8)
        assert not kept.is_ended
        assert fakes[1].connections == 1


async def test_one_that_speaks_is_not_lost(fakes: list[FakeDetokenizer]) -> None:
    fakes[0].sign_interval_ms = 100
    async with connected(fakes[:1], silence_s=0.6) as pool:
        (exchange,) = await admitted(pool, submission())
        for _ in range(12):
            fakes[0].say()
            await asyncio.sleep(0.1)
        assert not exchange.is_ended
        assert fakes[0].connections == 1


async def test_what_a_stopping_one_does_not_finish_is_finished_elsewhere(
    fakes: list[FakeDetokenizer],
) -> None:
    stopping = common_pb2.Failure(reason=common_pb2.FAILURE_REASON_DRAINING, message="stopping")
    for fake in fakes:
        fake.behaviour = Behaviour(failure_after=0, failure=stopping, delay_s=0.05)
    async with connected(fakes) as pool:
        exchange = pool.submit(submission())
        await until(lambda: sum(sizes(fakes)) == 1)
        first = sizes(fakes).index(1)
        fakes[first].drain()
        fakes[1 - first].behaviour = Behaviour()
        assert b"[DONE]" in await exchange.wait_for_end()


async def test_the_same_end_of_one_that_does_not_drain_is_the_end(
    fakes: list[FakeDetokenizer],
) -> None:
    stopping = common_pb2.Failure(reason=common_pb2.FAILURE_REASON_DRAINING, message="stopping")
    for fake in fakes:
        fake.behaviour = Behaviour(failure_after=0, failure=stopping)
    async with connected(fakes) as pool:
        with pytest.raises(RequestError, match="stopping"):
            await pool.submit(submission()).wait_for_end()
        assert sum(sizes(fakes)) == 1


@pytest.mark.parametrize(
    "bounds", [ResubmitBounds(timeout_s=0.0), ResubmitBounds(timeout_s=5.0, max_bytes=10)]
)
async def test_what_is_not_kept_fails_with_its_detokenizer(
    fakes: list[FakeDetokenizer], bounds: ResubmitBounds
) -> None:
    async with connected(fakes, bounds) as pool:
        (exchange,) = await admitted(pool, submission())
        assert pool.num_kept_bytes == 0
        await fakes[sizes(fakes).index(1)].stop()
        with pytest.raises(RequestError) as caught:
            await exchange.wait_for_end()
        assert caught.value.reason is FailureReason.UPSTREAM_LOST


async def test_a_request_that_waits_can_be_closed_and_aborted_and_drained(
    fakes: list[FakeDetokenizer],
) -> None:
    async with connected(fakes) as pool:
        exchanges = await admitted(pool, *(submission(name) for name in "abc"))
        for fake in fakes:
            await fake.stop()
        await until(lambda: len(pool._waiting) == 3)
        before = sizes(fakes)
        pool.close(exchanges[0])
        assert await pool.abort("b") == 1
        assert exchanges[1].error is not None
        assert exchanges[1].error.reason is FailureReason.CANCELLED
        pool.fail_all(RequestError(FailureReason.DRAINING, "stopping"))
        assert str(exchanges[2].error) == "stopping"
        for fake in fakes:
            await fake.start()
        await until(lambda: pool.num_ready == 2)
        assert pool.num_open == 0
        assert sizes(fakes) == before
        for exchange in exchanges:
            pool.close(exchange)
        assert pool.num_kept_bytes == 0


async def test_a_closed_request_is_aborted_where_it_is_now(fakes: list[FakeDetokenizer]) -> None:
    async with connected(fakes) as pool:
        # Their stream ids on the two connections are the same numbers.
        exchanges = await admitted(pool, submission("a"), submission("b"))
        found = {exchange.request_id: exchange for exchange in exchanges}
        by_fake = [found[fake.submits[0].submit.request_id] for fake in fakes]
        await fakes[0].stop()
        await until(lambda: sizes(fakes) == [1, 2])
        pool.close(by_fake[0])
        await fakes[1].wait_until(lambda: fakes[1].aborted)
        assert fakes[1].aborted == [fakes[1].submits[1].stream_id]
        assert not by_fake[1].is_ended
        await fakes[0].start()
        pool.close(by_fake[0])
        assert pool.num_open == 1


async def test_an_abort_by_id_reaches_whoever_has_it(fakes: list[FakeDetokenizer]) -> None:
    async with connected(fakes) as pool:
        await admitted(pool, submission("a"), submission("b"))
        assert [await pool.abort(name) for name in ("a", "b", "c")] == [1, 1, 0]
        await fakes[0].stop()
        await until(lambda: not pool.clients[0].is_connected)
        assert await pool.abort(fakes[1].submits[0].submit.request_id) == 1
        await fakes[1].stop()
        await until(lambda: not pool.is_connected)
        with pytest.raises(RequestError, match="cannot be reached"):
            await pool.abort("c")


async def test_a_reset_of_the_caches_goes_through_one_that_is_there(
    fakes: list[FakeDetokenizer],
) -> None:
    async with connected(fakes) as pool:
        await fakes[0].stop()
        await until(lambda: pool.num_ready == 1)
        assert await pool.reset_cache() == 12
        assert fakes[1].num_resets == 1
        await fakes[1].stop()
        await until(lambda: not pool.is_connected)
        with pytest.raises(RequestError, match="cannot be reached"):
            await pool.reset_cache()
