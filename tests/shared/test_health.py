import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared import health
from shared.health import HealthThread
from shared.rpc import open_channel

# Against hanging, not about speed.
LIMIT_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def probe(address: str, service: str = "") -> str:
    """The answer of one that is there, however long this process takes to connect."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await health.probe(address, service=service, timeout_s=LIMIT_S)
            if answer != "UNREACHABLE":
                return answer


def is_serving(address: str) -> bool:
    """Asked without an event loop."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
    return bool(answer.status == SERVING)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/h"


@pytest.fixture
async def thread(address: str) -> AsyncIterator[HealthThread]:
    thread = HealthThread(address=address, service="scheduler", stall_after_s=0.4)
    thread.start()
    yield thread
    thread.stop()


async def test_not_serving_until_told_otherwise(thread: HealthThread, address: str) -> None:
    assert await probe(address) == "NOT_SERVING"
    assert thread.reason == "starting"
    thread.set_status(True)
    assert await probe(address) == "SERVING"
    assert await probe(address, service="scheduler") == "SERVING"
    assert await probe(address, service="other") == "SERVICE_UNKNOWN"
    assert thread.reason == ""
    thread.set_status(False, "worker lost")
    assert await probe(address) == "NOT_SERVING"
    assert thread.reason == "worker lost"


async def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    assert await health.probe(f"unix:{tmp_path}/nobody") == "UNREACHABLE"


async def test_watch_stays_open_and_tells_each_change(thread: HealthThread, address: str) -> None:
    async with open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            seen = [(await call.read()).status]
            for is_ready in (True, False, True):
                thread.set_status(is_ready, "" if is_ready else "why")
                answer = await asyncio.wait_for(call.read(), 30)
                seen.append(answer.status)
        finally:
            call.cancel()
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]


async def test_more_watchers_than_threads_do_not_starve_check(
    thread: HealthThread, address: str
) -> None:
    async with open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(8)]
        try:
            for call in calls:
                assert (await asyncio.wait_for(call.read(), 30)).status == NOT_SERVING
            assert await probe(address) == "NOT_SERVING"
        finally:
            for call in calls:
                call.cancel()


async def test_a_blocked_loop_cannot_hide(
    thread: HealthThread,
    address: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "TICK_S", 0.05)
    thread.set_status(True)
    ticking = asyncio.create_task(thread.keep_ticking())
    changes = health.watch(address)
    while await asyncio.wait_for(anext(changes), 30) != "SERVING":
        pass  # this process stood still by itself
    deadline = time.monotonic() + LIMIT_S
    while is_serving(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # noqa: ASYNC251  # the loop is blocked on purpose
    seen = [await asyncio.wait_for(anext(changes), 30) for _ in range(2)]
    assert seen == ["NOT_SERVING", "SERVING"]
    assert "test_a_blocked_loop_cannot_hide" in capfd.readouterr().err
    ticking.cancel()
    await changes.aclose()


async def test_the_watchdog_waits_for_the_first_tick(thread: HealthThread, address: str) -> None:
    thread.set_status(True)
    await asyncio.sleep(0.6)
    assert await probe(address) == "SERVING"


async def test_watching_survives_a_restart(address: str) -> None:
    changes = health.watch(address)
    waiting = asyncio.create_task(anext(changes))
    await asyncio.sleep(0.1)
    first = HealthThread(address=address, service="x")
    first.start()
    assert await asyncio.wait_for(waiting, 30) == "NOT_SERVING"
    first.set_status(True)
    assert await asyncio.wait_for(anext(changes), 30) == "SERVING"
    await asyncio.to_thread(first.stop)
    seen = await asyncio.wait_for(anext(changes), 30)
    while seen != "UNREACHABLE":
        seen = await asyncio.wait_for(anext(changes), 30)
    second = HealthThread(address=address, service="x")
    second.set_status(True)
    second.start()
    assert await asyncio.wait_for(anext(changes), 30) == "SERVING"
    second.stop()
    await changes.aclose()


async def test_stopping_tells_the_watchers(thread: HealthThread, address: str) -> None:
    thread.set_status(True)
    changes = health.watch(address)
    assert await asyncio.wait_for(anext(changes), 30) == "SERVING"
    await asyncio.to_thread(thread.stop)
    assert await asyncio.wait_for(anext(changes), 30) == "NOT_SERVING"
    await changes.aclose()


async def test_a_process_that_is_slow_to_take_a_connection_is_asked_all_the_same(
    thread: HealthThread, address: str, tmp_path: Path
) -> None:
    """Longer than the pause between two tries; a try that ends before is UNREACHABLE."""
    thread.set_status(True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/slow")
        listener.listen()
        passing = threading.Thread(target=pass_on_slowly, args=(listener, address[5:]))
        passing.start()
        assert await health.probe(f"unix:{tmp_path}/slow", timeout_s=LIMIT_S) == "SERVING"
        await asyncio.to_thread(passing.join, LIMIT_S)
        assert not passing.is_alive()


def pass_on_slowly(listener: socket.socket, path: str) -> None:
    """One connection, which gets its first words late."""
    outer, _ = listener.accept()
    time.sleep(0.4)
    with outer, socket.socket(socket.AF_UNIX) as inner:
        inner.connect(path)
        there = threading.Thread(target=pump, args=(outer, inner))
        there.start()
        pump(inner, outer)
        there.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
