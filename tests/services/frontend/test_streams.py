"""Delivery of frames, silence and clients that do not read."""

import asyncio
import time
from typing import Any

import pytest

from services.frontend.exchange import Exchange
from services.frontend.http_protocol import CONNECTION_EXTENSION
from services.frontend.streams import FAILED_STALL_S, StreamAnswer, StreamKeeper
from shared.errors import FailureReason, RequestError
from shared.sampling import SequenceStats


class Client:
    """Stands for the connection; notes the credit."""

    def __init__(self) -> None:
        self.credit = 0

    def give_credit(self, exchange: Exchange, num_bytes: int) -> None:
        self.credit += num_bytes


class Connection:
    """Stands for the straight way to the socket."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_free = True
        self.num_dropped = 0
        self.num_unsent_bytes = 9000

    def write(self, data: bytes) -> bool:
        if self.is_free:
            self.written.append(data)
        return self.is_free

    def drop(self) -> None:
        self.num_dropped += 1


class Delivery:
    """A stream on its way to a socket that can be blocked."""

    def __init__(self, **limits: float) -> None:
        values = {"keep_alive_s": 15.0, "stall_s": 30.0, "max_s": 3600.0, **limits}
        self.keeper = StreamKeeper(**values)
        self.exchange, self.client = Exchange("r"), Client()
        self.exchange.admit()
        self.sent: list[bytes] = []
        self.messages: list[dict[str, Any]] = []
        self.num_first = 0
        self.connection = Connection()
        self.connection.is_free = False
        self.is_open = asyncio.Event()
        self.is_open.set()

    def start(self) -> "asyncio.Task[None]":
        def first() -> None:
            self.num_first += 1

        answer = StreamAnswer(
            self.exchange,
            detokenizers=self.client,  # type: ignore[arg-type]  # only credits are used
            keeper=self.keeper,
            headers={"x-a": "b"},
            on_first_bytes=first,
        )
        scope = {
            "type": "http",
            "extensions": {CONNECTION_EXTENSION: {"connection": self.connection}},
        }
        return asyncio.create_task(answer(scope, None, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        await self.is_open.wait()
        self.messages.append(message)
        if message.get("body"):
            self.sent.append(message["body"])


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_head_goes_out_before_any_frame() -> None:
    delivery = Delivery()
    task = delivery.start()
    await settle()
    head = delivery.messages[0]
    assert head["status"] == 200
    assert (b"x-a", b"b") in head["headers"]
    assert (b"content-type", b"text/event-stream; charset=utf-8") in head["headers"]
    assert not any(name == b"content-length" for name, _ in head["headers"])
    delivery.exchange.finish("stop", SequenceStats())
    await task


async def test_frames_leave_as_they_came_and_give_credit() -> None:
    delivery = Delivery()
    task = delivery.start()
    for frame in (b"one", b"two"):
        await settle()
        delivery.exchange.push(frame)
    await settle()
    assert delivery.sent == [b"one", b"two"]
    assert (delivery.client.credit, delivery.num_first) == (6, 1)
    delivery.exchange.finish("stop", SequenceStats())
    await task
    assert delivery.messages[-1]["more_body"] is False


async def test_frames_go_straight_to_a_connection_that_is_free() -> None:
    delivery = Delivery()
    delivery.connection.is_free = True
    delivery.exchange.push(b"zero")
    task = delivery.start()
    await settle()
    assert delivery.sent == [b"zero"]
    delivery.exchange.push(b"one")
    assert delivery.connection.written == [b"one"]
    delivery.connection.is_free = False
    delivery.exchange.push(b"two")
    delivery.connection.is_free = True
    delivery.exchange.push(b"three")
    await settle()
    assert (delivery.sent, delivery.connection.written) == ([b"zero", b"twothree"], [b"one"])
    delivery.exchange.push(b"four")
    delivery.exchange.finish("stop", SequenceStats())
    await task
    assert delivery.connection.written == [b"one", b"four"]
    assert (delivery.client.credit, delivery.num_first) == (len("zeroonetwothreefour"), 1)
    assert delivery.messages[-1]["more_body"] is False


async def test_no_frame_overtakes_one_that_is_being_sent() -> None:
    delivery = Delivery()
    task = delivery.start()
    await settle()
    delivery.is_open.clear()
    delivery.exchange.push(b"one")
    await settle()
    delivery.connection.is_free = True
    delivery.exchange.push(b"two")
    assert delivery.connection.written == []
    delivery.is_open.set()
    await settle()
    assert delivery.sent == [b"one", b"two"]
    delivery.exchange.finish("stop", SequenceStats())
    await task


async def test_frames_that_wait_for_a_slow_client_leave_as_one() -> None:
    delivery = Delivery()
    delivery.is_open.clear()
    task = delivery.start()
    await settle()
    delivery.exchange.push(b"one")
    delivery.exchange.push(b"two")
    delivery.exchange.finish("stop", SequenceStats())
    delivery.is_open.set()
    await task
    assert delivery.sent == [b"onetwo"]


async def test_a_failed_stream_ends_with_error_and_done_after_its_frames() -> None:
    delivery = Delivery()
    delivery.exchange.push(b"data: {}\n\n")
    delivery.exchange.fail(RequestError(FailureReason.INTERNAL, "internal error 1\u2028"))
    await delivery.start()
    text = b"".join(delivery.sent).decode()
    assert text.startswith('data: {}\n\ndata: {"error": {"message": "internal error 1\\u2028"')
    assert text.endswith("\n\ndata: [DONE]\n\n")


async def test_only_silent_streams_get_comment_lines() -> None:
    delivery = Delivery(keep_alive_s=10.0)
    before = time.monotonic()
    task = delivery.start()
    await settle()
    delivery.keeper.look(before + 9)
    await settle()
    assert delivery.sent == []
    delivery.keeper.look(time.monotonic() + 11)
    await settle()
    assert delivery.sent == [b": keep-alive\n\n"]
    assert (delivery.num_first, delivery.client.credit) == (0, 0)
    delivery.exchange.finish("stop", SequenceStats())
    await task


async def test_keep_alive_zero_is_off() -> None:
    delivery = Delivery(keep_alive_s=0.0)
    task = delivery.start()
    await settle()
    delivery.keeper.look(time.monotonic() + 3000)
    await settle()
    assert delivery.sent == []
    delivery.exchange.finish("stop", SequenceStats())
    await task


@pytest.mark.parametrize(("has_failed", "limit"), [(False, 30.0), (True, FAILED_STALL_S)])
async def test_a_client_that_takes_nothing_is_cut_off(has_failed: bool, limit: float) -> None:
    delivery = Delivery()
    task = delivery.start()
    await settle()
    before = time.monotonic()
    delivery.is_open.clear()
    delivery.exchange.push(b"x")
    await settle()
    if has_failed:
        delivery.exchange.fail(RequestError(FailureReason.SLOW_READER, "slow"))
    delivery.keeper.look(before + limit - 1)
    await settle()
    assert not task.done()
    delivery.keeper.look(time.monotonic() + limit + 1)
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.reason is FailureReason.SLOW_READER
    assert delivery.connection.num_dropped == 1


async def test_a_slow_client_that_takes_bytes_is_not_cut_off() -> None:
    """However few, and though the stream has been waiting for it all the time."""
    delivery = Delivery()
    task = delivery.start()
    await settle()
    delivery.is_open.clear()
    delivery.exchange.push(b"x")
    await settle()
    started = time.monotonic()
    for turn in range(10):
        delivery.connection.num_unsent_bytes -= 1
        delivery.keeper.look(started + 20 * turn)
        await settle()
    assert not task.done()
    delivery.keeper.look(started + 211)  # nothing since 180
    with pytest.raises(RequestError):
        await task


async def test_a_stream_past_its_time_fails() -> None:
    delivery = Delivery(max_s=100.0)
    task = delivery.start()
    await settle()
    delivery.keeper.look(time.monotonic() + 101)
    await task
    assert b"deadline_exceeded" in delivery.sent[-1]


async def test_a_cancelled_stream_is_looked_after_no_more() -> None:
    delivery = Delivery()
    task = delivery.start()
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    delivery.keeper.look(time.monotonic() + 9999)
    assert delivery.connection.num_dropped == 0
