"""A slow reader is cut; nobody waits for it."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from services.scheduler.outbox import Outbox, OutboxLimits
from shared.errors import FailureReason, RequestError


@dataclass
class Message:
    number: int
    size: int = 10

    def ByteSize(self) -> int:
        return self.size


async def test_messages_are_written_in_order_until_complete() -> None:
    outbox: Outbox[Message] = Outbox(OutboxLimits())
    written: list[int] = []

    async def write(message: Message) -> None:
        written.append(message.number)
        if message.number == 1:
            outbox.put(Message(2))
            outbox.complete()
            outbox.put(Message(3))  # after the end: dropped

    outbox.put(Message(1))
    await outbox.write_all(write)
    assert written == [1, 2]


async def test_a_writer_waits_for_messages() -> None:
    outbox: Outbox[Message] = Outbox(OutboxLimits())
    written: list[int] = []

    async def write(message: Message) -> None:
        written.append(message.number)

    task = asyncio.create_task(outbox.write_all(write))
    await asyncio.sleep(0)
    outbox.put(Message(1))
    await asyncio.sleep(0)
    assert written == [1]
    outbox.complete()
    await task


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    outbox: Outbox[Message] = Outbox(OutboxLimits(stall_s=0.05))
    outbox.put(Message(1))
    with pytest.raises(RequestError, match=r"took nothing for 0\.05 s") as caught:
        await outbox.write_all(lambda _: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    assert caught.value.reason is FailureReason.SLOW_READER


async def test_a_reader_that_lets_too_much_gather_is_cut() -> None:
    outbox: Outbox[Message] = Outbox(OutboxLimits(max_bytes=100))
    gate = asyncio.Event()
    written: list[int] = []

    async def write(message: Message) -> None:
        await gate.wait()
        written.append(message.number)

    task = asyncio.create_task(outbox.write_all(write))
    for number in range(20):
        outbox.put(Message(number))
    gate.set()
    with pytest.raises(RequestError, match="left over 100 bytes unread"):
        await task
    assert len(written) <= 1


async def test_a_write_that_gets_nowhere_is_not_waited_for_once_too_much_has_gathered() -> None:
    outbox: Outbox[Message] = Outbox(OutboxLimits(max_bytes=100, stall_s=600))
    task = asyncio.create_task(outbox.write_all(lambda _: asyncio.Event().wait()))  # type: ignore[arg-type,return-value]
    for number in range(20):
        outbox.put(Message(number))
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        with pytest.raises(RequestError, match="left over 100 bytes unread"):
            await task


async def test_too_much_may_gather_in_the_very_turn_in_which_a_write_took_too_long() -> None:
    outbox: Outbox[Message] = Outbox(OutboxLimits(max_bytes=100, stall_s=0.02))
    outbox.put(Message(0, size=100))
    raised: list[BaseException] = []

    def overflow() -> None:
        try:
            outbox.put(Message(1))
        except RuntimeError as error:
            raised.append(error)

    task = asyncio.create_task(outbox.write_all(lambda _: asyncio.Event().wait()))  # type: ignore[arg-type,return-value]
    await asyncio.sleep(0)
    assert outbox._writing is not None
    over_at = outbox._writing.when()
    assert over_at is not None
    asyncio.get_running_loop().call_at(over_at + 1e-6, overflow)
    # Nothing else runs until both are due: one turn of the loop sees the two of them.
    time.sleep(0.05)  # noqa: ASYNC251  # on purpose
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.reason is FailureReason.SLOW_READER
    assert not raised


async def test_one_message_may_be_larger_than_the_bound() -> None:
    outbox: Outbox[Message] = Outbox(OutboxLimits(max_bytes=100))
    outbox.put(Message(1, size=1000))
    outbox.complete()
    written: list[Message] = []

    async def write(message: Message) -> None:
        written.append(message)

    await outbox.write_all(write)
    assert len(written) == 1
