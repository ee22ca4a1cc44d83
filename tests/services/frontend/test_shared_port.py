"""A process on a port that others listen on: it comes once it can serve, and refuses nobody."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos.glm.v1 import admin_pb2, admin_pb2_grpc
from services.frontend import process
from services.frontend.http_server import HttpServer, bind
from services.frontend.process import run
from services.frontend.settings import FrontendSettings
from shared.rpc import open_channel
from tests.services.frontend.conftest import MODEL_DIR, teapot
from tests.services.frontend.fake_detokenizer import FakeDetokenizer

LIMIT_S = 60.0


class Port:
    """One that is taken already, by a sibling that answers 418 to everything."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.folder = folder
        self.stop = asyncio.Event()

    @property
    def fake(self) -> FakeDetokenizer:
        """Of the newcomer; not started."""
        return FakeDetokenizer(f"unix:{self.folder}/d.sock")

    async def newcomer(self) -> None:
        """Another process on it, until `stop`."""
        settings = FrontendSettings(
            address=f"unix:{self.folder}/f.sock",
            admin_address=f"unix:{self.folder}/a.sock",
            detokenizer_address=f"unix:{self.folder}/d.sock",
            model=MODEL_DIR,
            port=self.number,
            reuse_port=True,
        )
        await run(settings, self.stop)

    async def status(self) -> int:
        """Of a connection of its own."""
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            return (await client.get(f"http://127.0.0.1:{self.number}/health")).status_code

    async def statuses(self, number: int = 20) -> set[int]:
        return {await self.status() for _ in range(number)}

    async def until(self, status: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await self.status() != status:
                pass

    async def drain(self) -> None:
        """As an operator does, once it can be told."""
        async with asyncio.timeout(LIMIT_S), open_channel(f"unix:{self.folder}/a.sock") as channel:
            await channel.channel_ready()
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())


@pytest.fixture
async def port(run_dir: Path) -> AsyncIterator[Port]:
    sibling = HttpServer(teapot, bind("127.0.0.1", 0, is_shared=True))
    await sibling.start()
    yield Port(sibling.port, run_dir)
    await sibling.stop()


@pytest.fixture
def serving(port: Port) -> Callable[[], AbstractAsyncContextManager[asyncio.Task[None]]]:
    """The newcomer as a task; stopped at the end."""

    @contextlib.asynccontextmanager
    async def inside() -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(port.newcomer())
        try:
            yield task
        finally:
            port.stop.set()
            await asyncio.wait_for(task, LIMIT_S)

    return inside


async def test_it_joins_when_it_has_a_detokenizer(
    port: Port, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "JOIN_S", LIMIT_S)
    fake = port.fake
    async with serving():
        assert await port.statuses() == {418}
        await fake.start()
        await port.until(200)
    await fake.stop()


async def test_without_any_detokenizer_it_joins_all_the_same(
    port: Port, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "JOIN_S", 0.05)
    async with serving():
        await port.until(503)


async def test_told_to_stop_before_it_never_joins(
    port: Port, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "JOIN_S", 4 * LIMIT_S)
    async with serving() as task:
        assert await port.statuses(3) == {418}
        port.stop.set()
        while not task.done():
            assert await port.status() == 418


async def test_drained_before_it_never_joins(
    port: Port, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "JOIN_S", 1.0)
    async with serving() as task:
        await port.drain()
        await asyncio.sleep(1.5)  # past the time for joining
        assert await port.statuses() == {418}
        assert not task.done()


async def test_drained_it_leaves_the_port_to_others(port: Port, serving: Any) -> None:
    fake = port.fake
    await fake.start()
    async with serving() as task:
        await port.until(200)
        await port.drain()
        await asyncio.sleep(2 * process.LATE_S)  # what had come is served until then
        assert await port.statuses() == {418}
        assert not task.done()
    await fake.stop()
