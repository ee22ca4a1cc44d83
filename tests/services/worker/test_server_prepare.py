"""The door through which constraints are prepared."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from protos.glm.v1 import worker_pb2, worker_pb2_grpc
from services.worker.grammar.writer import refused
from services.worker.orders import LocalOrders
from services.worker.prefill_spans import PrefillSpans
from services.worker.replay import ReplayExecutor
from services.worker.runner import Runner
from services.worker.server import WorkerServicer
from shared.constraint import Constraint, FormatKind, PrepareOrder, TextFormat
from shared.errors import FailureReason
from shared.rpc import build_server, error_from_rpc, open_channel
from shared.wire_constraint import constraint_to_proto
from tests.services.worker.plans import make_capacity


class FakeDesk:
    def __init__(self) -> None:
        self.asked: list[PrepareOrder] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_cancelled = False

    async def prepare(self, order: PrepareOrder) -> int:
        constraint = order.constraint
        self.asked.append(order)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if constraint.format is not None and constraint.format.text == "bad":
            raise refused("format", "is bad")
        return 17


@pytest.fixture
def desk() -> FakeDesk:
    return FakeDesk()


@pytest_asyncio.fixture
async def stubs(desk: FakeDesk) -> AsyncIterator[Any]:
    """A door with a desk and one without."""
    runner = Runner(lambda: ReplayExecutor(make_capacity()), LocalOrders())
    with tempfile.TemporaryDirectory() as folder:
        servers, channels, found = [], [], []
        for name, given in (("a", desk), ("b", None)):
            address = f"unix:{folder}/{name}.sock"
            server = build_server(address=address)
            WorkerServicer(runner, LocalOrders(), PrefillSpans(), given).add_to(server)  # type: ignore[arg-type]  # a fake
            await server.start()
            channel = open_channel(address)
            servers.append(server)
            channels.append(channel)
            found.append(worker_pb2_grpc.WorkerServiceStub(channel))
        yield found
        for channel in channels:
            await channel.close()
        for server in servers:
            await server.stop(0)


def ask(text: str) -> worker_pb2.PrepareSequenceRequest:
    constraint = Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))
    return worker_pb2.PrepareSequenceRequest(
        request_id="r1",
        constraint=constraint_to_proto(constraint),
        traceparent="tp",
        tenant_id="t1",
    )


async def test_a_constraint_is_prepared_and_the_time_told(stubs: Any, desk: FakeDesk) -> None:
    answer = await stubs[0].PrepareSequence(ask("a+"))
    assert answer.prepare_us == 17
    assert desk.asked == [
        PrepareOrder(
            constraint=Constraint(format=TextFormat(kind=FormatKind.REGEX, text="a+")),
            request_id="r1",
            tenant_id="t1",
            traceparent="tp",
        )
    ]


async def test_a_refusal_brings_reason_and_field(stubs: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs[0].PrepareSequence(ask("bad"))
    error = error_from_rpc(caught.value)
    assert error.reason is FailureReason.INVALID_ARGUMENT
    assert (error.field, error.message) == ("constraint.format", "format: is bad")


async def test_a_caller_that_stops_waiting_sets_the_desk_free(stubs: Any, desk: FakeDesk) -> None:
    desk.may_answer.clear()
    call = stubs[0].PrepareSequence(ask("a"))
    while not desk.asked:  # noqa: ASYNC110  # the server runs on this loop
        await asyncio.sleep(0.01)
    call.cancel()
    while not desk.was_cancelled:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_replay_worker_constrains_nothing_and_says_so(stubs: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs[1].PrepareSequence(ask("a"))
    assert error_from_rpc(caught.value).reason is FailureReason.FEATURE_DISABLED
