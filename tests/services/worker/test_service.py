import asyncio
import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protos.glm.v1 import worker_pb2
from services.worker.__main__ import main
from services.worker.server import SERVICE_NAME
from services.worker.service import WorkerService
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.health import probe
from shared.rpc import open_channel
from shared.sampling import ReplayScript
from tests.services.worker.plans import Entry, make_plan, make_sequence
from tests.services.worker.scheduler_client import SchedulerClient, ids_of


@pytest.fixture
def folder() -> Any:
    """Short paths: a socket's name holds 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def settings(folder: Path, **changes: Any) -> WorkerSettings:
    values = {
        "worker_mode": "replay",
        "address": f"unix:{folder}/w.sock",
        "health_address": f"unix:{folder}/h.sock",
        "admin_address": f"unix:{folder}/a.sock",
    }
    return WorkerSettings(**(values | changes))


async def until(status: str, address: str) -> None:
    async with asyncio.timeout(60):
        while await probe(address, service=SERVICE_NAME) != status:  # noqa: ASYNC110  # a process
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(chosen: WorkerSettings) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(WorkerService(chosen).run(stop))
    try:
        assert chosen.health_address is not None
        await until("SERVING", chosen.health_address)
        yield
    finally:
        stop.set()
        await task


async def test_a_service_turns_healthy_and_runs_steps(folder: Path) -> None:
    async with serving(settings(folder)), open_channel(f"unix:{folder}/w.sock") as channel:
        client = SchedulerClient(channel)
        opened = await client.open(1)
        assert opened.capacity.is_replay
        script = ReplayScript(token_ids=(7,))
        new = make_sequence(0, [1, 2], script=script, eos_token_ids=(9,), max_tokens=9)
        plan = make_plan(1, {0: Entry(scheduled=2, blocks=(1,))}, new=[new])
        assert ids_of(await client.run(plan)) == [7]


async def test_stopping_ends_an_open_epoch_in_bounded_time(folder: Path) -> None:
    async with open_channel(f"unix:{folder}/w.sock") as channel:
        client = SchedulerClient(channel)
        async with serving(settings(folder)):
            await client.open(1)
            started = time.monotonic()
        assert time.monotonic() - started < 15
        await client.end_code()


async def test_the_admin_door_tells_state_and_drains(folder: Path) -> None:
    from protos.glm.v1 import admin_pb2, admin_pb2_grpc

    async with (
        serving(settings(folder)),
        open_channel(f"unix:{folder}/a.sock") as door,
        open_channel(f"unix:{folder}/w.sock") as channel,
    ):
        client = SchedulerClient(channel)
        await client.open(1)
        stub = admin_pb2_grpc.AdminServiceStub(door)
        script = ReplayScript(token_ids=(7, 8))
        new = make_sequence(0, [1], script=script, eos_token_ids=(9,), max_tokens=9)
        await client.run(make_plan(1, {0: Entry(blocks=(1,))}, new=[new]))
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert status.service == "worker"
        assert status.num_live == 1
        assert status.last_step_age_ms < 10_000
        await stub.Drain(admin_pb2.DrainRequest())
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert status.is_draining
        await until("NOT_SERVING", f"unix:{folder}/h.sock")


async def test_a_step_without_end_turns_the_service_unhealthy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from services.worker.replay import ReplayExecutor

    may_run = threading.Event()
    execute = ReplayExecutor.execute

    def held(self: ReplayExecutor, plan: Any, wait_us: int) -> Any:
        assert may_run.wait(90)
        return execute(self, plan, wait_us)

    monkeypatch.setattr(ReplayExecutor, "execute", held)
    chosen = settings(folder, stall_timeout_s=0.2)
    async with serving(chosen), open_channel(f"unix:{folder}/w.sock") as channel:
        client = SchedulerClient(channel)
        await client.open(1)
        await client.send(make_plan(1, {}))
        await until("NOT_SERVING", f"unix:{folder}/h.sock")
        # The loop itself is free: it answers while the step hangs.
        await client.stub.GetCapacity(worker_pb2.GetCapacityRequest(), timeout=30)
        may_run.set()
        await client.result()
        await until("SERVING", f"unix:{folder}/h.sock")
    assert "Current thread" in capfd.readouterr().err


async def test_stopping_while_weights_are_read_ends_at_once_and_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from services.worker import model_build
    from services.worker.loading.progress import LoadProgress

    is_loading = threading.Event()
    has_ended = threading.Event()

    def slow(_path: Any, _spec: Any, _strategy: Any, report: Any) -> None:
        progress = LoadProgress(num_tensors=0, total_tensors=9, num_bytes=0, total_bytes=9)
        try:
            while True:
                report(progress)
                is_loading.set()
        finally:
            has_ended.set()

    monkeypatch.setattr(model_build, "load_model", slow)
    # Who is not told to stop reads on for ever; who is may need a moment on a busy machine.
    monkeypatch.setattr("services.worker.service._GRACE_S", 20.0)
    monkeypatch.setattr(model_build.ops, "set_num_threads", lambda _: None)  # of all tests
    nano = Path(__file__).parents[3] / "models" / "glm-nano"
    chosen = settings(folder, worker_mode="model", model=nano, num_threads=1)
    stop = asyncio.Event()
    task = asyncio.create_task(WorkerService(chosen).run(stop))
    assert await asyncio.to_thread(is_loading.wait, 60)
    stop.set()
    await asyncio.wait_for(task, 30)
    assert has_ended.is_set()
    assert "left behind" not in caplog.text


class FakeDesk:
    compiler = None

    def __init__(self) -> None:
        self.told: list[str] = []

    def warm(self) -> None:
        self.told.append("warm")

    async def close(self) -> None:
        self.told.append("closed")


async def test_grammars_get_ready_as_soon_as_the_model_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: reading weights comes first. And not with the first constraint."""
    desk = FakeDesk()
    monkeypatch.setattr("services.worker.service.open_desk", lambda _: desk)
    async with serving(settings(folder)):
        assert desk.told == ["warm"]
    assert desk.told == ["warm", "closed"]


async def test_what_keeps_the_model_from_loading_ends_the_service(folder: Path) -> None:
    chosen = settings(folder, num_kv_blocks=2)
    with pytest.raises(ConfigError, match="--num-kv-blocks 2"):
        await WorkerService(chosen).run(asyncio.Event())


async def test_a_runner_that_died_ends_the_service(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.worker.runner import Runner

    stop = asyncio.Event()
    task = asyncio.create_task(WorkerService(settings(folder)).run(stop))
    await until("SERVING", f"unix:{folder}/h.sock")
    monkeypatch.setattr(Runner, "is_alive", False)
    with pytest.raises(BaseExceptionGroup) as caught:
        await task
    assert caught.group_contains(RuntimeError, match="thread died")


def test_a_wrong_setting_exits_with_2_and_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{folder}/w.sock"
    assert main(["--address", address]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "--model is required" in error
    assert main(["--address", address, "--model", f"{folder}/nowhere"]) == 2
    assert "nowhere" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_serves_soon_and_ends_well_on_a_signal(
    folder: Path, number: signal.Signals
) -> None:
    flags = (
        f"--worker-mode replay --address unix:{folder}/w.sock --health-address unix:{folder}/h.sock"
    )
    command = (sys.executable, "-P", "-m", "services.worker", *flags.split())
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        await until("SERVING", f"unix:{folder}/h.sock")
        process.send_signal(number)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
