import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.glm.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared import rpc_link
from shared.errors import FailureReason, RequestError
from shared.rpc import build_server
from shared.rpc_link import ConnectLink, Silence, StreamIds, SubmitQueue

Request = scheduler_pb2.SchedulerServiceConnectRequest
Response = scheduler_pb2.SchedulerServiceConnectResponse


class Echo(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers every submit with a verdict, in one message."""

    def __init__(self) -> None:
        self.num_messages = 0

    async def Connect(self, requests: AsyncIterator[Request], context: Any) -> None:
        # Clients wait until something is said.
        await context.write(Response())
        async for request in requests:
            self.num_messages += 1
            response = Response()
            for submit in request.submits:
                response.verdicts.add(stream_id=submit.priority)
            await context.write(response)


class Owner:
    """Sends what it is given, keeps what comes."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.got: list[int] = []
        self.states: list[bool] = []
        self.is_picky = False

    def next_message(self) -> Request | None:
        if not self.ready:
            return None
        ready, self.ready = self.ready, []
        return Request(submits=[scheduler_pb2.TokenSubmit(priority=n) for n in ready])

    def take_message(self, message: Response) -> None:
        if self.is_picky:
            raise RequestError(FailureReason.INVALID_ARGUMENT, "column x")
        self.got += [verdict.stream_id for verdict in message.verdicts]

    def connection_changed(self, is_connected: bool) -> None:
        self.states.append(is_connected)


async def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  # told by no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(address: str) -> AsyncIterator[Echo]:
    server, echo = build_server(address=address), Echo()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(echo, server)
    await server.start()
    try:
        yield echo
    finally:
        await server.stop(0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d/x.sock"


@contextlib.asynccontextmanager
async def linked(address: str) -> AsyncIterator[tuple[ConnectLink, Owner]]:
    owner = Owner()
    link = ConnectLink(
        address,
        peer="scheduler",
        open_call=lambda c: scheduler_pb2_grpc.SchedulerServiceStub(c).Connect(),
        owner=owner,
    )
    task = asyncio.create_task(link.run())
    try:
        yield link, owner
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_what_is_ready_goes_out_in_one_message(address: str) -> None:
    async with serving(address) as echo, linked(address) as (link, owner):
        await until(lambda: link.is_connected)
        owner.ready = [3, 4, 5]
        link.wake()
        await until(lambda: owner.got == [3, 4, 5])
        assert echo.num_messages == 1


async def test_a_peer_that_starts_late_is_reached(address: str) -> None:
    async with linked(address) as (link, owner):
        await asyncio.sleep(0.15)
        with pytest.raises(RequestError, match="scheduler cannot be reached") as caught:
            link.check_connected()
        assert caught.value.reason is FailureReason.UPSTREAM_LOST
        assert caught.value.retry_after_ms
        async with serving(address):
            await until(lambda: link.is_connected)
            link.check_connected()
        await until(lambda: owner.states == [True, False])


async def test_a_peer_that_comes_back_is_reached_again(address: str) -> None:
    async with linked(address) as (link, owner):
        for _ in range(2):
            async with serving(address):
                await until(lambda: link.is_connected)
                owner.ready = [7]
                link.wake()
                await until(lambda: bool(owner.got))
                owner.got = []
            await until(lambda: not link.is_connected)
        assert owner.states == [True, False, True, False]


async def test_a_broken_contract_costs_the_stream_and_is_told_as_a_loss(address: str) -> None:
    async with serving(address) as echo, linked(address) as (link, owner):
        await until(lambda: link.is_connected)
        owner.is_picky = True
        owner.ready = [1]
        link.wake()
        await until(lambda: False in owner.states)
        owner.is_picky = False
        await until(lambda: link.is_connected)
        owner.ready = [2]
        link.wake()
        await until(lambda: owner.got == [2])
        assert echo.num_messages == 2


async def test_a_stream_that_is_dropped_is_told_as_a_loss_and_opened_again(address: str) -> None:
    async with serving(address) as echo, linked(address) as (link, owner):
        link.drop()  # nothing is up yet
        await until(lambda: link.is_connected)
        link.drop()
        await until(lambda: owner.states == [True, False, True])
        owner.ready = [2]
        link.wake()
        await until(lambda: owner.got == [2])
        assert echo.num_messages == 1


class Mute(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Takes connections and says nothing."""

    ends_at_once = False

    async def Connect(self, requests: AsyncIterator[Request], context: Any) -> None:
        await context.send_initial_metadata(())
        if self.ends_at_once:
            return
        await asyncio.sleep(60)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "shared.rpc_link"]


@pytest.mark.parametrize("kind", ["another service", "ends at once", "says nothing"])
async def test_what_is_no_such_peer_is_never_up_and_tried_less_and_less_often(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Whoever says something, a refusal even, is given the time to.
    monkeypatch.setattr(rpc_link, "FIRST_MESSAGE_S", 0.05 if kind == "says nothing" else 60.0)
    monkeypatch.setattr(rpc_link, "RECONNECT_MAX_S", 0.8)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(pause_s: float) -> None:
        if rpc_link.RECONNECT_MIN_S <= pause_s <= rpc_link.RECONNECT_MAX_S:
            pauses.append(pause_s)
        await sleep(pause_s)

    server, mute = build_server(address=address), Mute()
    mute.ends_at_once = kind == "ends at once"
    if kind != "another service":
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(mute, server)
    await server.start()
    async with linked(address) as (link, owner):
        monkeypatch.setattr(asyncio, "sleep", counted)
        await until(lambda: len(pauses) >= 5)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert not link.is_connected
        assert owner.states == [], "health does not flap"
    await server.stop(0)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 0.8
    (line,) = warnings_of(caplog)
    assert address in line
    reason = {"another service": "UNIMPLEMENTED", "ends at once": "ended the stream at once"}
    assert reason.get(kind, "said nothing for 0.05 s") in line


async def test_a_peer_that_is_up_for_moments_only_is_tried_less_and_less_often(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(address) as echo, linked(address) as (_, owner):
        owner.is_picky = True  # its first message is taken for none of the contract
        started = time.monotonic()
        await until(lambda: owner.states.count(True) >= 4)
        # After 0.1, 0.2, 0.4 seconds, and not ten times a second.
        assert time.monotonic() - started > 0.6
        assert len(warnings_of(caplog)) <= 1 + len(owner.states)
        assert sum("broke the contract" in line for line in warnings_of(caplog)) == 1
        assert echo.num_messages == 0


def test_silence_is_counted_in_looks_while_signs_are_promised_and_ends_with_any_message() -> None:
    silence = Silence()
    assert [silence.look(is_promised=True) for _ in range(3)] == [1, 2, 3]
    silence.hear()
    assert [silence.look(is_promised=True) for _ in range(2)] == [0, 1]
    assert silence.look(is_promised=False) == 0
    assert silence.look(is_promised=True) == 1


async def test_the_channel_is_there_exactly_while_connected(address: str) -> None:
    async with linked(address) as (link, _):
        assert link.channel is None
        async with serving(address):
            await until(lambda: link.is_connected)
            assert isinstance(link.channel, grpc.aio.Channel)
        await until(lambda: link.channel is None)


def submit_of(size: int) -> scheduler_pb2.TokenSubmit:
    submit = scheduler_pb2.TokenSubmit(cache_salt="x" * (size - 2))
    assert submit.ByteSize() == size
    return submit


def test_a_message_holds_no_more_bytes_of_submits_than_allowed() -> None:
    queue: SubmitQueue[scheduler_pb2.TokenSubmit] = SubmitQueue(100)
    for size in (60, 40, 30, 90):
        submit = submit_of(size)
        queue.put(submit, queue.check(submit))
    taken = []
    while len(queue):
        taken.append([submit.ByteSize() for submit in queue.take()])
    assert taken == [[60, 40], [30], [90]]
    assert queue.take() == []


def test_a_submit_that_no_message_can_hold_is_refused() -> None:
    queue: SubmitQueue[scheduler_pb2.TokenSubmit] = SubmitQueue(100)
    assert queue.check(submit_of(100)) == 100
    with pytest.raises(RequestError, match="larger than 100 bytes") as caught:
        queue.check(submit_of(101))
    assert caught.value.reason is FailureReason.INVALID_ARGUMENT


def test_a_cleared_queue_sends_nothing() -> None:
    queue: SubmitQueue[scheduler_pb2.TokenSubmit] = SubmitQueue(100)
    queue.put(submit_of(5), 5)
    queue.clear()
    assert (len(queue), queue.take()) == (0, [])


def test_an_id_is_not_given_twice_while_it_lives() -> None:
    live = {2, 3}
    ids = StreamIds(live.__contains__)
    assert [ids.fresh(), ids.fresh()] == [1, 4]
    ids._last = (1 << 32) - 2
    live.add(0)
    live.add(1)
    assert [ids.fresh(), ids.fresh()] == [(1 << 32) - 1, 4]
