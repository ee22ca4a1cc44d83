import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import pytest

from protos.glm.v1 import admin_pb2, admin_pb2_grpc
from shared.config import ServiceSettings
from shared.errors import FailureReason, RequestError
from shared.health import probe
from shared.rpc import build_server, open_channel
from shared.sides import ServiceSides, Work

# Against hanging, not about speed.
LIMIT_S = 60.0


class Settings(ServiceSettings):
    service: ClassVar[str] = "scheduler"


class Process:
    """A service with nothing but sides; its work is a number."""

    def __init__(self, folder: Path) -> None:
        self.num_live = 0
        self.num_refusals = 0
        self.failures: list[RequestError] = []
        self.beside_ended = False
        self.stop = asyncio.Event()
        address = f"unix:{folder}/d/"
        self.settings = Settings(
            address=address + "x",
            health_address=address + "h",
            admin_address=address + "a",
        )
        self.sides = ServiceSides(
            self.settings,
            service_name="glm.v1.SchedulerService",
            work=Work(
                num_live=lambda: self.num_live,
                refuse_new=self._refuse,
                last_step_age_s=lambda: 0.5,
            ),
            reason="no worker yet",
        )

    async def run(self, drain_limit_s: float) -> None:
        await self.sides.serve(
            build_server(address=self.settings.address),
            stop=self.stop,
            beside=(self._beside(),),
            fail_all=self._fail,
            drain_limit_s=drain_limit_s,
        )

    async def health(self) -> str:
        return await probe(self.settings.health_address or "", timeout_s=LIMIT_S)

    def _refuse(self) -> None:
        self.num_refusals += 1

    def _fail(self, error: RequestError) -> None:
        self.failures.append(error)
        self.num_live = 0

    async def _beside(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.beside_ended = True


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


@contextlib.asynccontextmanager
async def running(
    process: Process, drain_limit_s: float = LIMIT_S
) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(process.run(drain_limit_s))
    await until(lambda: Path(process.settings.address.removeprefix("unix:")).exists())
    try:
        yield task
    finally:
        process.stop.set()
        process.num_live = 0
        async with asyncio.timeout(LIMIT_S):
            await task


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  # told by no event
            await asyncio.sleep(0.01)


async def until_health(process: Process, wanted: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await process.health() != wanted:  # noqa: ASYNC110  # told by no event
            await asyncio.sleep(0.02)


async def test_health_shows_what_the_service_says(process: Process) -> None:
    async with running(process):
        await until_health(process, "NOT_SERVING")
        process.sides.show("")
        await until_health(process, "SERVING")
        process.sides.show("worker gone")
        await until_health(process, "NOT_SERVING")
        assert process.sides.reason == "worker gone"


async def test_operators_see_the_work_and_can_drain_it(process: Process) -> None:
    async with running(process), open_channel(process.settings.admin_address or "") as channel:
        process.sides.show("")
        process.num_live = 3
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30, wait_for_ready=True)
        assert (status.num_live, status.last_step_age_ms, status.is_draining) == (3, 500, False)
        answer = await stub.Drain(admin_pb2.DrainRequest(), timeout=30)
        assert (answer.num_live, process.num_refusals) == (3, 1)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
        assert (status.is_draining, status.not_serving_reason) == (True, "draining")
        await until_health(process, "NOT_SERVING")
        process.sides.show("")
        assert process.sides.reason == "draining"


async def test_stopping_waits_for_running_work(process: Process) -> None:
    async with running(process) as task:
        process.num_live = 1
        process.stop.set()
        await until(lambda: process.num_refusals == 1)
        done, _ = await asyncio.wait({task}, timeout=0.2)
        assert not done
        process.num_live = 0
        async with asyncio.timeout(30):
            await task
    assert process.failures == []
    assert process.beside_ended


async def test_work_that_outlasts_the_limit_gets_a_failed_end(process: Process) -> None:
    async with running(process, drain_limit_s=0.1) as task:
        process.num_live = 1
        process.stop.set()
        async with asyncio.timeout(30):
            await task
    assert [error.reason for error in process.failures] == [FailureReason.DRAINING]
    assert "scheduler is stopping" in process.failures[0].message


async def test_a_task_beside_that_dies_ends_the_process(process: Process) -> None:
    async def die() -> None:
        raise OSError("boom")

    with pytest.raises(ExceptionGroup) as caught:
        await process.sides.serve(
            build_server(address=process.settings.address),
            stop=process.stop,
            beside=(die(),),
            fail_all=process.failures.append,
            drain_limit_s=1,
        )
    assert caught.group_contains(OSError)
