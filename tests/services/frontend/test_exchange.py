"""The mailbox of one request."""

import asyncio

import pytest

from services.frontend.exchange import Exchange
from shared.errors import FailureReason, RequestError
from shared.sampling import SequenceStats

LOST = RequestError(FailureReason.UPSTREAM_LOST, "lost")


@pytest.fixture
def exchange() -> Exchange:
    return Exchange("r")


async def test_a_refusal_is_raised_to_who_waits_for_the_verdict(exchange: Exchange) -> None:
    waiting = asyncio.create_task(exchange.wait_for_verdict())
    await asyncio.sleep(0)
    exchange.fail(LOST)
    with pytest.raises(RequestError, match="lost"):
        await waiting


async def test_frames_that_came_with_the_verdict_are_kept(exchange: Exchange) -> None:
    exchange.admit()
    exchange.push(b"a")
    exchange.push(b"b")
    await exchange.wait_for_verdict()
    await exchange.wait()
    assert exchange.take() == b"ab"
    assert exchange.take() == b""


async def test_an_end_before_anybody_waited_is_not_missed(exchange: Exchange) -> None:
    exchange.admit()
    exchange.push(b"body")
    exchange.finish("stop", SequenceStats(num_output_tokens=2))
    await exchange.wait_for_verdict()
    assert await exchange.wait_for_end() == b"body"
    assert exchange.finish_reason == "stop"


async def test_a_body_in_parts_is_joined(exchange: Exchange) -> None:
    exchange.admit()
    waiting = asyncio.create_task(exchange.wait_for_end())
    for part in (b"a", b"b"):
        await asyncio.sleep(0)
        exchange.push(part)
    await asyncio.sleep(0)
    exchange.finish("stop", SequenceStats())
    assert await waiting == b"ab"


async def test_bytes_before_a_failure_are_still_read(exchange: Exchange) -> None:
    exchange.admit()
    exchange.push(b"a")
    exchange.fail(LOST)
    await exchange.wait()
    assert exchange.take() == b"a"
    assert exchange.error is LOST


async def test_the_first_end_stands(exchange: Exchange) -> None:
    exchange.finish("stop", SequenceStats())
    exchange.fail(LOST)
    exchange.push(b"late")
    assert (exchange.error, exchange.take()) == (None, b"")


def test_what_comes_after_a_failure_is_dropped(exchange: Exchange) -> None:
    exchange.fail(LOST)
    exchange.push(b"late")
    exchange.finish("stop", SequenceStats())
    assert (exchange.stats, exchange.take()) == (None, b"")


async def test_a_sink_takes_pieces_past_the_reader_in_order(exchange: Exchange) -> None:
    taken: list[bytes] = []
    is_free = True

    def sink(piece: bytes) -> bool:
        if is_free:
            taken.append(piece)
        return is_free

    exchange.sink = sink
    exchange.push(b"a")
    is_free = False
    exchange.push(b"b")
    is_free = True
    exchange.push(b"c")
    assert (taken, exchange.take()) == ([b"a"], b"bc")
    exchange.push(b"d")
    assert taken == [b"a", b"d"]


async def test_a_wake_ends_a_wait_without_news(exchange: Exchange) -> None:
    waiting = asyncio.create_task(exchange.wait())
    await asyncio.sleep(0)
    exchange.wake()
    exchange.wake()
    await waiting
    assert exchange.take() == b""


async def test_a_cancelled_wait_leaves_nothing_behind(exchange: Exchange) -> None:
    waiting = asyncio.create_task(exchange.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    exchange.push(b"a")
    assert exchange.take() == b"a"
