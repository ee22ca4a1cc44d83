"""The scheduler process over real channels, with a fake worker behind it."""

import asyncio
import random

import grpc.aio
import pytest

from protos.glm.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    scheduler_pb2,
    worker_pb2,
)
from shared.errors import FailureReason
from shared.rpc import error_from_rpc, open_channel
from tests.services.scheduler.conftest import (
    LIMIT_S,
    Received,
    Running,
    expected,
    sequence,
    submit,
    take,
)


def generate(running: Running, message: scheduler_pb2.TokenSubmit) -> grpc.aio.UnaryStreamCall:
    return running.stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(submit=message))


async def refusal_of(call: grpc.aio.UnaryStreamCall) -> tuple[str, FailureReason, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = error_from_rpc(caught.value)
    return caught.value.code().name, error.reason, error.field


# -- Connect -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
async def test_connect_streams_every_token_of_many_sequences(running: Running, window: int) -> None:
    await running.start(max_plans_in_flight=window)
    peer = running.peer()
    await peer.submit(*(submit(f"r{n}", sequence(n, 3 + n), max_tokens=10) for n in range(20)))
    await peer.read_until_ended(*range(20))
    for n in range(20):
        entry = peer.received[n]
        assert entry.tokens == expected(n, 3 + n, 10)
        assert entry.end is not None
        assert entry.end.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert entry.end.finished.stats.num_prompt_tokens == 3 + n
        assert entry.end.finished.stats.num_output_tokens == 10
        assert len(entry.starts) == 1
        assert entry.starts[0].num_prompt_tokens == 3 + n
        assert entry.starts[0].prefill_us == entry.end.finished.stats.prefill_us
    load = await running.wait_until_idle()
    assert load.num_output_tokens_total == 200


async def test_the_load_is_on_the_stream_from_its_start(running: Running) -> None:
    await running.start()
    peer = running.peer()
    await peer.read()
    assert peer.load is not None
    assert peer.load.is_worker_ready
    assert peer.load.max_model_len == 128
    await peer.submit(submit("r", sequence(0), max_tokens=4))
    await peer.read_until_ended(0)
    while peer.load.num_output_tokens_total != 4:
        await peer.read()


async def test_a_scheduler_without_work_says_so_twice_a_second(running: Running) -> None:
    await running.start()
    peer = running.peer()
    started = asyncio.get_running_loop().time()
    num_silent = 0
    while num_silent < 3:
        async with asyncio.timeout(LIMIT_S):
            num_silent += not (await peer.call.read()).ByteSize()
    took = asyncio.get_running_loop().time() - started
    # Five seconds of silence count as a loss.
    assert 1.2 < took < 5.0, "half a second each"
    peer.call.cancel()


async def test_the_load_names_the_run_its_model_and_whether_it_drains(running: Running) -> None:
    await running.start()
    before = await running.load()
    assert before.instance_id
    assert not before.is_draining
    assert (before.model_digest, before.block_size_tokens) == ("", 4), "the fake worker's"
    async with open_channel(running.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        await stub.Drain(admin_pb2.DrainRequest(), timeout=LIMIT_S)
    after = await running.load()
    assert after.is_draining
    assert after.instance_id == before.instance_id


async def test_siblings_of_one_response_stream_side_by_side(running: Running) -> None:
    await running.start()
    peer = running.peer()
    await peer.submit(submit("r", *(sequence(n, 5, seed=n, index=n) for n in range(4))))
    await peer.read_until_ended(0, 1, 2, 3)
    assert [peer.received[n].tokens for n in range(4)] == [expected(n, 5, 8) for n in range(4)]


async def test_logprobs_pass_through(running: Running) -> None:
    await running.start()
    peer = running.peer()
    await peer.submit(submit("a", sequence(0), num_logprobs=0), submit("b", sequence(1)))
    await peer.read_until_ended(0, 1)
    assert peer.received[0].logprobs == [-float(token) for token in expected(0, 5, 8)]
    assert peer.received[1].logprobs == []


async def test_a_refusal_is_a_verdict_and_leaves_the_stream_alone(running: Running) -> None:
    await running.start()
    peer = running.peer()
    too_long = submit("long", sequence(1, 128))
    bad_bytes = submit("bytes", sequence(2))
    bad_bytes.sequences[0].prompt_token_ids = b"abc"
    prioritised = submit("priority", sequence(3), priority=1)
    await peer.submit(submit("ok", sequence(0)), too_long, bad_bytes, prioritised)
    await peer.read_until_ended(0, 1, 2, 3)
    refusals = [peer.received[n].verdict.refusal for n in (1, 2, 3)]
    assert [refusal.reason for refusal in refusals] == [
        common_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED,
        common_pb2.FAILURE_REASON_INVALID_ARGUMENT,
        common_pb2.FAILURE_REASON_FEATURE_DISABLED,
    ]
    assert "128" in refusals[0].message
    assert refusals[1].field == "prompt_token_ids"
    assert peer.received[0].tokens == expected(0, 5, 8)
    assert peer.received[1].end is None


async def test_a_full_queue_is_refused_with_a_time_to_come_back(running: Running) -> None:
    await running.start(max_queued_requests=1, max_num_seqs=1)
    running.worker.gate.clear()
    peer = running.peer()
    await peer.submit(submit("a", sequence(0)))
    await asyncio.wait_for(running.worker.plan_seen.wait(), LIMIT_S)
    await peer.submit(submit("b", sequence(1)), submit("c", sequence(2)))
    await peer.read_until_ended(2)
    refusal = peer.received[2].verdict.refusal
    assert refusal.reason == common_pb2.FAILURE_REASON_QUEUE_FULL
    assert refusal.is_retryable
    assert refusal.retry_after_ms >= 500
    running.worker.gate.set()
    await peer.read_until_ended(0, 1)


async def test_an_abort_in_mid_decode_frees_every_block(running: Running) -> None:
    await running.start()
    running.worker.step_s = 0.01
    peer = running.peer()
    await peer.submit(submit("a", sequence(0), sequence(1), max_tokens=100))
    await peer.read_until_tokens(0, 3)
    running.worker.gate.clear()
    await peer.abort(0)
    await peer.abort(1, reason=scheduler_pb2.ABORT_REASON_STOP_STRING, num_tokens_kept=2)
    await peer.abort(0, 77)  # again, and one that nobody knows
    await peer.read_until_ended(0, 1)
    first, second = peer.received[0].end, peer.received[1].end
    assert first is not None
    assert second is not None
    assert first.finished.reason == common_pb2.FINISH_REASON_ABORT
    assert second.finished.reason == common_pb2.FINISH_REASON_STOP
    assert second.finished.stats.num_output_tokens == 2
    num_steps = (await running.load()).num_steps_total
    running.worker.gate.set()
    load = await running.wait_until_idle()
    assert load.num_steps_total <= num_steps + 2
    assert load.num_aborts_total == 1


async def test_a_stream_that_ends_takes_its_sequences_along(running: Running) -> None:
    await running.start()
    running.worker.step_s = 0.01
    gone, staying = running.peer(), running.peer()
    await gone.submit(submit("a", sequence(0), max_tokens=100))
    await staying.submit(submit("b", sequence(0, 7), max_tokens=30))
    await gone.read_until_tokens(0, 2)
    running.worker.gate.clear()
    gone.call.cancel()
    await running.wait_for_load(lambda load: load.num_aborts_total == 1)
    running.worker.gate.set()
    await staying.read_until_ended(0)
    assert staying.received[0].tokens == expected(0, 7, 30)
    load = await running.wait_until_idle()
    assert load.num_aborts_total == 1


async def test_closing_the_sending_side_ends_the_stream(running: Running) -> None:
    await running.start()
    running.worker.gate.clear()
    peer = running.peer()
    await peer.submit(submit("a", sequence(0)))
    await asyncio.wait_for(running.worker.plan_seen.wait(), LIMIT_S)
    await peer.call.done_writing()
    with pytest.raises(EOFError):
        await peer.read_for_ever()
    running.worker.gate.set()
    await running.wait_until_idle()


@pytest.mark.parametrize(
    "submits",
    [
        [submit("a", sequence(0), sequence(0))],
        [submit("a", sequence(0)), submit("b", sequence(0))],
        [submit("a")],
    ],
    ids=["twice in one request", "of a live sequence", "none"],
)
async def test_stream_ids_that_nobody_could_be_answered_by_end_the_stream(
    running: Running, submits: list[scheduler_pb2.TokenSubmit]
) -> None:
    await running.start()
    running.worker.gate.clear()
    peer = running.peer()
    for message in submits:
        await peer.submit(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.read_for_ever()
    assert error_from_rpc(caught.value).field == "stream_ids"
    running.worker.gate.set()
    await running.wait_until_idle()


async def test_stream_ids_of_two_connections_do_not_meet(running: Running) -> None:
    await running.start()
    first, second = running.peer(), running.peer()
    await first.submit(submit("a", sequence(0, 5)))
    await second.submit(submit("b", sequence(0, 6)))
    await first.read_until_ended(0)
    await second.read_until_ended(0)
    assert first.received[0].tokens == expected(0, 5, 8)
    assert second.received[0].tokens == expected(0, 6, 8)


@pytest.mark.parametrize(
    ("stall_s", "max_bytes"), [(4.0, 1 << 30), (60.0, 1 << 16)], ids=["by time", "by bytes"]
)
async def test_a_peer_that_stops_reading_is_cut_and_others_keep_their_speed(
    running: Running, stall_s: float, max_bytes: int
) -> None:
    """Logprobs make the stream wide, so that what gRPC takes for itself is soon full."""
    await running.start(reader_stall_timeout_s=stall_s, reader_max_bytes=max_bytes)
    running.worker.num_padding_logprobs = 3000
    running.worker.step_s = 0.01
    stuck, reading = running.narrow_peer(), running.peer()
    await stuck.submit(
        *(submit(f"s{n}", sequence(n), max_tokens=120, num_logprobs=900) for n in range(8))
    )
    await reading.submit(submit("r", sequence(0), max_tokens=120))
    await reading.read_until_tokens(0, 60)
    # Its time is over before its answers are whole.
    running.worker.gate.clear()
    await running.wait_for_load(lambda load: load.num_aborts_total == 8)
    running.worker.gate.set()
    await reading.read_until_ended(0)
    assert reading.received[0].tokens == expected(0, 5, 120)
    await running.wait_until_idle()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stuck.read_for_ever()
    assert error_from_rpc(caught.value).reason is FailureReason.SLOW_READER


async def test_two_hundred_cancels_at_random_moments_leave_nothing_behind(
    running: Running,
) -> None:
    await running.start(max_num_batched_tokens=16)
    running.worker.step_s = 0.001
    dice = random.Random(7)

    async def one(number: int) -> None:
        call = generate(
            running, submit(f"c{number}", sequence(0, dice.randint(1, 60)), max_tokens=60)
        )
        await asyncio.sleep(dice.random() * 0.05)
        call.cancel()

    for start in range(0, 200, 40):
        await asyncio.gather(*(one(n) for n in range(start, start + 40)))
    load = await running.wait_until_idle()
    assert load.num_free_blocks == load.num_total_blocks == 64
    peer = running.peer()
    await peer.submit(submit("after", *(sequence(n) for n in range(16))))
    await peer.read_until_ended(*range(16))
    assert peer.received[15].tokens == expected(15, 5, 8)


# -- Generate, Abort, WatchLoad ------------------------------------------------------------------


async def test_generate_streams_one_request_to_its_end(running: Running) -> None:
    await running.start()
    received = {n: Received() for n in range(2)}
    call = generate(running, submit("g", sequence(0), sequence(1, 6)))
    async for message in call:
        take(message, received)
    assert [received[n].tokens for n in range(2)] == [expected(0, 5, 8), expected(1, 6, 8)]
    assert all(entry.end for entry in received.values())
    assert await call.code() is grpc.StatusCode.OK


async def test_generate_ends_with_the_status_of_a_refusal(running: Running) -> None:
    await running.start()
    too_long = generate(running, submit("g", sequence(0, 128)))
    assert await refusal_of(too_long) == (
        "OUT_OF_RANGE",
        FailureReason.CONTEXT_LENGTH_EXCEEDED,
        "prompt_token_ids",
    )
    doubled = generate(running, submit("g", sequence(0), sequence(0)))
    assert await refusal_of(doubled) == (
        "INVALID_ARGUMENT",
        FailureReason.INVALID_ARGUMENT,
        "stream_ids",
    )
    empty = generate(running, submit("g"))
    assert (await refusal_of(empty))[2] == "stream_ids"


async def test_a_cancelled_generate_frees_its_blocks(running: Running) -> None:
    await running.start()
    running.worker.step_s = 0.01
    call = generate(running, submit("g", sequence(0), max_tokens=100))
    await call.read()
    running.worker.gate.clear()
    call.cancel()
    await running.wait_for_load(lambda load: load.num_aborts_total == 1)
    running.worker.gate.set()
    await running.wait_until_idle()


async def test_the_deadline_of_the_call_is_the_limit_of_the_request(running: Running) -> None:
    await running.start()
    running.worker.gate.clear()
    call = running.stub.Generate(
        scheduler_pb2.SchedulerServiceGenerateRequest(submit=submit("g", sequence(0))), timeout=0.3
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    running.worker.gate.set()
    await running.wait_until_idle()


async def test_abort_by_id_is_idempotent_and_says_what_it_found(running: Running) -> None:
    await running.start()
    running.worker.gate.clear()
    peer = running.peer()
    await peer.submit(submit("a", sequence(0), sequence(1)))
    await asyncio.wait_for(running.worker.plan_seen.wait(), LIMIT_S)
    request = scheduler_pb2.SchedulerServiceAbortRequest(request_id="a")
    assert (await running.stub.Abort(request, timeout=30)).num_aborted == 2
    assert (await running.stub.Abort(request, timeout=30)).num_aborted == 0
    await peer.read_until_ended(0, 1)
    running.worker.gate.set()
    await running.wait_until_idle()


async def test_watch_load_follows_every_change(running: Running) -> None:
    await running.start()
    call = running.stub.WatchLoad(scheduler_pb2.WatchLoadRequest())
    first = (await call.read()).load
    assert first.num_output_tokens_total == 0
    peer = running.peer()
    await peer.submit(submit("a", sequence(0)))
    await peer.read_until_ended(0)
    load = first
    while load.num_output_tokens_total != 8:
        load = (await call.read()).load
    call.cancel()


# -- the worker ----------------------------------------------------------------------------------


async def test_a_killed_worker_fails_its_streams_after_the_grace_and_serves_again(
    running: Running,
) -> None:
    await running.start()
    running.worker.step_s = 0.02
    peer = running.peer()
    await peer.submit(submit("a", sequence(0), max_tokens=100))
    await peer.read_until_tokens(0, 2)
    started = asyncio.get_running_loop().time()
    await running.kill_worker()
    await peer.read_until_ended(0)
    assert asyncio.get_running_loop().time() - started < 10.0  # a step may take 20 s
    end = peer.received[0].end
    assert end is not None
    assert end.failed.reason == common_pb2.FAILURE_REASON_UPSTREAM_LOST
    assert end.failed.is_retryable
    await running.wait_for_health("NOT_SERVING")
    await running.start_worker()
    await running.wait_for_health("SERVING")
    await peer.submit(submit("b", sequence(1)))
    await peer.read_until_ended(1)
    assert peer.received[1].tokens == expected(1, 5, 8)


async def test_a_worker_that_restarts_at_once_costs_no_token(running: Running) -> None:
    await running.start(worker_grace_s=30)
    running.worker.step_s = 0.01
    peer = running.peer()
    await peer.submit(submit("a", sequence(0), sequence(1, 9), max_tokens=60))
    await peer.read_until_tokens(0, 5)
    await running.kill_worker()
    await running.start_worker()
    await peer.read_until_ended(0, 1)
    assert [peer.received[n].tokens for n in (0, 1)] == [expected(0, 5, 60), expected(1, 9, 60)]
    assert running.worker.epochs == [1, 2]


async def test_a_wrong_echo_ends_the_epoch_with_a_clear_error(running: Running) -> None:
    def twist(result: worker_pb2.StepResult) -> None:
        result.num_computed_tokens[0] += 1

    await running.start()
    running.worker.twist = twist
    peer = running.peer()
    await peer.submit(submit("a", sequence(0)))
    await peer.read_until_ended(0)
    end = peer.received[0].end
    assert end is not None
    assert end.failed.reason == common_pb2.FAILURE_REASON_UPSTREAM_LOST
    assert "step protocol" in end.failed.message
    running.worker.twist = lambda _: None
    await running.wait_for_health("SERVING")
    await peer.submit(submit("b", sequence(1)))
    await peer.read_until_ended(1)
    assert peer.received[1].tokens == expected(1, 5, 8)
    assert running.worker.epochs == [1, 2]


async def test_a_failed_step_is_tried_once_more_in_a_new_epoch(running: Running) -> None:
    def twist(result: worker_pb2.StepResult) -> None:
        result.failure.reason = common_pb2.FAILURE_REASON_INTERNAL
        running.worker.twist = lambda _: None

    await running.start(worker_grace_s=30)
    running.worker.twist = twist
    peer = running.peer()
    await peer.submit(submit("a", sequence(0)))
    await peer.read_until_ended(0)
    assert peer.received[0].tokens == expected(0, 5, 8)
    assert running.worker.epochs == [1, 2]


async def test_nothing_is_served_before_the_worker_has_its_model(running: Running) -> None:
    running.worker.is_loading = True
    await running.start_worker()
    await running.start(with_worker=False)
    await running.wait_for_health("NOT_SERVING")
    call = generate(running, submit("g", sequence(0)))
    assert (await refusal_of(call))[:2] == ("UNAVAILABLE", FailureReason.UPSTREAM_LOST)
    running.worker.is_loading = False
    await running.wait_for_health("SERVING")
    assert (await generate(running, submit("g", sequence(0))).read()).tokens.num_tokens == [1]
