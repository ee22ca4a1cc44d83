"""Services that hang, readers that stall, operators that drain: bounded, and with a reason."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from protos.glm.v1 import admin_pb2, admin_pb2_grpc
from shared.health import probe
from shared.rpc import open_channel
from tests.e2e.mesh import Mesh, is_alive, replay, running

# Far below the 60 s of who names none, and longer than a busy machine keeps a process waiting.
STEP_TIMEOUT_S = 4.0
STALL_TIMEOUT_S = 3
ASK: dict[str, Any] = {"model": "glm-nano", "messages": [{"role": "user", "content": "x"}]}
BODY: dict[str, Any] = {**ASK, **replay("word " * 500)}
# Almost as long as there can be: still under way when something is done to it.
LONG_BODY: dict[str, Any] = {**ASK, **replay("word " * 1900)}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A mesh with short limits, told by the environment."""
    yield from running(
        *("--worker", "replay"),
        environment={
            "GLM_MESH_SCHEDULER_STEP_TIMEOUT_S": str(STEP_TIMEOUT_S),
            "GLM_MESH_FRONTEND_CLIENT_STALL_TIMEOUT_S": str(STALL_TIMEOUT_S),
        },
    )


def test_a_frozen_worker_is_found_by_its_missing_step(mesh: Mesh) -> None:
    pid = mesh.pid("worker")
    frozen_at, data = 0.0, []
    url = f"{mesh.url}/v1/chat/completions"
    try:
        with httpx.stream("POST", url, json={**LONG_BODY, "stream": True}, timeout=40) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data.append(line.removeprefix("data: "))
                if len(data) == 10 and not frozen_at:
                    os.kill(pid, signal.SIGSTOP)
                    frozen_at = time.monotonic()
        assert data[-1] == "[DONE]"
        assert '"error"' in data[-2]
        assert time.monotonic() - frozen_at < STEP_TIMEOUT_S + 20
        health = mesh.address("scheduler", "health_address")
        mesh.until(lambda: asyncio.run(probe(health)) == "NOT_SERVING", 10, "it is not ready")
        assert httpx.post(url, json=BODY, timeout=30).status_code == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    mesh.until_serving()
    assert mesh.pid("worker") == pid  # it was frozen, not dead: nobody restarted it
    assert httpx.post(url, json=BODY, timeout=30).status_code == 200
    mesh.until_idle()


def test_a_reader_that_stalls_is_cut_and_harms_nobody(mesh: Mesh) -> None:
    mesh.until_serving()
    httpx.post(f"{mesh.url}/v1/chat/completions", json=BODY, timeout=30).raise_for_status()
    num_done = mesh.metric("vllm:request_success_total")
    parts = urlsplit(mesh.url)
    body = httpx.Request("POST", mesh.url, json={**BODY, "stream": True, "n": 16}).content
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((str(parts.hostname), int(parts.port or 0)))
        lazy.sendall(head.encode() + body)
        lazy.settimeout(30)
        assert lazy.recv(1, socket.MSG_PEEK), "it runs"
        started = time.monotonic()
        answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=BODY, timeout=30)
        assert answer.status_code == 200
        assert time.monotonic() - started < 15
        mesh.until(lambda: mesh.metric("vllm:num_requests_running") == 0, 30, "it was cut")
        # The quick reader's, and not the stalled one's too.
        mesh.until(
            lambda: mesh.metric("vllm:request_success_total") > num_done, 10, "it is counted"
        )
        assert mesh.metric("vllm:request_success_total") == num_done + 1
    mesh.until_idle()


def test_a_drained_frontend_ends_what_runs_and_takes_nothing_new(mesh: Mesh) -> None:
    mesh.until_serving()
    url = f"{mesh.url}/v1/chat/completions"
    finished: list[dict[str, Any]] = []

    def read() -> None:
        finished.append(httpx.post(url, json=LONG_BODY, timeout=60).json())

    reader = threading.Thread(target=read)
    reader.start()
    mesh.until(lambda: mesh.metric("vllm:num_requests_running") > 0, 10, "it runs")

    async def drain() -> int:
        async with open_channel(mesh.address("frontend", "admin_address")) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.Drain(admin_pb2.DrainRequest(), timeout=20)
            return int(answer.num_live)

    assert asyncio.run(drain()) == 1
    refused = httpx.post(url, json=BODY, timeout=10)
    assert refused.status_code == 503
    assert "Retry-After" in refused.headers
    assert not mesh.is_serving()
    reader.join(60)
    assert finished[0]["choices"][0]["finish_reason"] == "stop"

    before = mesh.pid("frontend")
    os.kill(before, signal.SIGTERM)  # an operator replaces it
    mesh.until(lambda: not is_alive(before) and mesh.pid("frontend") != before, 40, "it is back")
    mesh.until_serving()
    assert httpx.post(url, json=BODY, timeout=30).status_code == 200
