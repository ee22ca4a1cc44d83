"""Constrained requests through the scheduler's door: verdicts wait for the worker."""

import asyncio

import grpc.aio
import pytest

from protos.glm.v1 import scheduler_pb2
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.errors import FailureReason
from shared.rpc import error_from_rpc
from shared.wire_constraint import constraint_to_proto
from tests.services.scheduler.conftest import Running, expected, sequence, submit


def constrained(
    request_id: str, text: str, *sequences: object, **changes: object
) -> scheduler_pb2.TokenSubmit:
    message = submit(request_id, *sequences, **changes)  # type: ignore[arg-type]
    constraint = Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))
    message.sampling.constraint.CopyFrom(constraint_to_proto(constraint))
    return message


async def test_a_verdict_waits_for_the_worker_and_tokens_for_the_verdict(running: Running) -> None:
    await running.start()
    running.worker.may_prepare.clear()
    peer = running.peer()
    given = constrained("r1", "a+", sequence(1), sequence(2))
    given.tenant_id = "t1"
    await peer.submit(given)
    await peer.submit(submit("r2", sequence(3)))
    await peer.read_until_ended(3)
    assert not peer.received[1].tokens
    running.worker.may_prepare.set()
    await peer.read_until_ended(1, 2)
    assert peer.received[1].tokens == expected(1, 5, 8)
    (asked,) = running.worker.prepared
    assert (asked.request_id, asked.tenant_id) == ("r1", "t1")
    assert asked.constraint.format.text == "a+"


async def test_a_refused_constraint_is_a_refusal_of_the_request(running: Running) -> None:
    await running.start()
    call = running.stub.Generate(
        scheduler_pb2.SchedulerServiceGenerateRequest(submit=constrained("g", "bad", sequence(0)))
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = error_from_rpc(caught.value)
    assert error.reason is FailureReason.INVALID_ARGUMENT
    assert (error.field, error.message) == ("constraint.format", "format: is bad")
    await running.wait_until_idle()


async def test_generate_streams_a_constrained_request(running: Running) -> None:
    await running.start()
    call = running.stub.Generate(
        scheduler_pb2.SchedulerServiceGenerateRequest(submit=constrained("g", "a", sequence(0)))
    )
    num_tokens = 0
    async for message in call:
        num_tokens += sum(message.tokens.num_tokens)
    assert num_tokens == 8


async def test_a_call_that_is_cancelled_on_the_way_leaves_nothing(running: Running) -> None:
    await running.start()
    running.worker.may_prepare.clear()
    call = running.stub.Generate(
        scheduler_pb2.SchedulerServiceGenerateRequest(submit=constrained("g", "a", sequence(0)))
    )
    while not running.worker.prepared:  # noqa: ASYNC110  # the worker runs on this loop
        await asyncio.sleep(0.01)
    call.cancel()
    running.worker.may_prepare.set()
    load = await running.wait_until_idle()
    assert load.num_output_tokens_total == 0


async def test_a_stream_id_on_its_way_is_in_use(running: Running) -> None:
    await running.start()
    running.worker.may_prepare.clear()
    peer = running.peer()
    await peer.submit(constrained("r1", "a", sequence(1)))
    await peer.submit(submit("r2", sequence(1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.read_until_ended(1)
    assert error_from_rpc(caught.value).field == "stream_ids"
    running.worker.may_prepare.set()
