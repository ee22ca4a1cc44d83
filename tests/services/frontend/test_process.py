"""Start, drain and stop of the whole process."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.frontend import process as process_module
from services.frontend.http_server import HttpServer, bind
from services.frontend.process import build_gateway, drain, run
from services.frontend.settings import FrontendSettings
from shared.errors import CheckpointError, ConfigError
from tests.services.frontend.conftest import MODEL_DIR, Mesh, teapot
from tests.services.frontend.fake_detokenizer import Behaviour, FakeDetokenizer


def settings_with(**values: Any) -> FrontendSettings:
    least = {
        "address": "unix:/tmp/x", "detokenizer_address": "unix:/tmp/y",
        "model": MODEL_DIR, "port": 0,
    }  # fmt: skip
    return FrontendSettings(**{**least, **values})


def test_a_context_longer_than_the_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 9999"):
        build_gateway(settings_with(max_model_len=9999))
    assert build_gateway(settings_with(max_model_len=100)).max_model_len == 100


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        build_gateway(settings_with(model=tmp_path))


async def test_draining_lets_running_requests_end_and_refuses_new_ones(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(pause_s=0.1)
    running = asyncio.create_task(mesh.chat(stream=True))
    await mesh.fake.wait_until(lambda: mesh.fake.submits)
    draining = asyncio.create_task(drain(mesh.gateway, mesh.server))
    await asyncio.sleep(0.05)
    refused = await mesh.chat()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await mesh.http.get("/health")).status_code == 503
    assert "[DONE]" in (await running).text
    async with asyncio.timeout(30):
        await draining


async def test_the_collector_leaves_alone_what_lives_as_long_as_the_process(run_dir: Path) -> None:
    settings = settings_with(
        address=f"unix:{run_dir}/f.sock", detokenizer_address=f"unix:{run_dir}/d.sock"
    )
    stop = asyncio.Event()
    gc.unfreeze()
    serving = asyncio.create_task(run(settings, stop))
    try:
        async with asyncio.timeout(60):
            while not gc.get_freeze_count():  # noqa: ASYNC110  # the collector tells nobody
                await asyncio.sleep(0.01)
        assert gc.get_freeze_count() > len(gc.get_objects())
    finally:
        gc.unfreeze()
        stop.set()
        await serving


class TestSharedPort:
    """Another process that listens on the same port."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"reuse_port": True}

    @pytest.fixture
    async def sibling(self, mesh: Mesh) -> AsyncIterator[HttpServer]:
        server = HttpServer(teapot, bind("127.0.0.1", mesh.port, is_shared=True))
        await server.start()
        yield server
        await server.stop()

    async def test_new_connections_go_to_the_other_from_the_start_of_the_drain(
        self, mesh: Mesh, sibling: HttpServer
    ) -> None:
        mesh.fake.behaviour = Behaviour(pause_s=0.2)
        assert (await self.ask_until(mesh, 200)).status_code == 200, "both get connections"
        num_before = len(mesh.fake.submits)
        asking = [asyncio.create_task(self.ask(mesh, stream=True)) for _ in range(20)]
        await mesh.fake.wait_until(lambda: len(mesh.fake.submits) > num_before)
        draining = asyncio.create_task(drain(mesh.gateway, mesh.server))
        await asyncio.sleep(0.05)
        late = [await self.ask(mesh) for _ in range(20)]
        assert {response.status_code for response in late} == {418}
        answers = await asyncio.gather(*asking)
        # Some may have been late themselves; that none of 20 was here has odds of 1 in 2 ** 20.
        assert {response.status_code for response in answers} - {418} == {200}
        assert all("[DONE]" in r.text for r in answers if r.status_code == 200)
        async with asyncio.timeout(30):
            await draining

    @pytest.fixture
    def is_late(self, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
        """Ends the time for requests on connections that came before; else it lasts for ever."""
        is_late, sleep = asyncio.Event(), asyncio.sleep

        async def wait(delay_s: float) -> None:
            await (is_late.wait() if delay_s == process_module.LATE_S else sleep(delay_s))

        monkeypatch.setattr(process_module, "LATE_S", 3600.0)
        monkeypatch.setattr(asyncio, "sleep", wait)
        return is_late

    async def test_connections_that_came_before_are_served_and_then_closed(
        self, mesh: Mesh, is_late: asyncio.Event
    ) -> None:
        streams = [await asyncio.open_connection("127.0.0.1", mesh.port) for _ in range(2)]
        draining = asyncio.create_task(drain(mesh.gateway, mesh.server))
        await asyncio.sleep(0.02)
        (reader, writer), (idle, _) = streams
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        is_late.set()
        async with asyncio.timeout(30):
            await draining
            assert await idle.read() == b""
            await reader.read()
        for _, stream in streams:
            stream.close()
        with pytest.raises(httpx.ConnectError):
            await self.ask(mesh)

    async def ask(self, mesh: Mesh, **fields: Any) -> httpx.Response:
        """One request over a connection of its own."""
        body = {"prompt": "Hi", **fields}
        async with httpx.AsyncClient(timeout=30) as client:
            return await client.post(f"http://127.0.0.1:{mesh.port}/v1/completions", json=body)

    async def ask_until(self, mesh: Mesh, status: int) -> httpx.Response:
        while (response := await self.ask(mesh)).status_code != status:
            pass
        return response


class TestDrainLimit:
    """A drain that may take no time."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"drain_timeout_s": 0.1}

    async def test_a_request_that_does_not_end_is_not_waited_for(self, mesh: Mesh) -> None:
        mesh.fake.behaviour = Behaviour(silent_after=0)
        running = asyncio.create_task(mesh.chat())
        await mesh.fake.wait_until(lambda: mesh.fake.submits)
        async with asyncio.timeout(30):
            await drain(mesh.gateway, mesh.server)
        response = await running
        assert response.status_code == 503
        assert "stopping" in response.json()["error"]["message"]


def start(run_dir: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable, "-P", "-m", "services.frontend",
        "--address", f"unix:{run_dir}/f.sock", "--health-address", f"unix:{run_dir}/f.health",
        "--admin-address", f"unix:{run_dir}/f.admin", "--model", str(MODEL_DIR),
        "--detokenizer-address", f"unix:{run_dir}/d.sock", *flags,
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})


async def read_port(process: "subprocess.Popen[str]") -> int:
    assert process.stderr is not None
    while line := await asyncio.to_thread(process.stderr.readline):
        if "listening on" in line:
            return int(line.rsplit(":", 1)[1])
    raise AssertionError("the frontend did not start")


async def test_the_process_serves_and_ends_with_zero_on_sigterm(run_dir: Path) -> None:
    fake = FakeDetokenizer(f"unix:{run_dir}/d.sock")
    await fake.start()
    process = start(run_dir, "--port", "0")
    try:
        port = await read_port(process)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            deadline = time.monotonic() + 60
            while (await client.get("/health")).status_code != 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            answer = await client.post("/v1/completions", json={"prompt": "Hi"})
            assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.communicate()
        await fake.stop()


async def test_a_wrong_setting_is_one_line_and_exit_code_two(run_dir: Path) -> None:
    process = start(run_dir, "--port", "0", "--reasoning-parser", "bogus")
    _, text = await asyncio.to_thread(process.communicate)
    assert process.returncode == 2
    assert text.count("\n") == 1
    assert "glm45" in text
