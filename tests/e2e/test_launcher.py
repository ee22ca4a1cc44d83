"""Starting and stopping, seen from the shell."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.mesh import SERVICES, Mesh, is_alive, replay

GLM_MESH = str(Path(sys.executable).parent / "glm-mesh")


def all_gone(pids: list[int], limit_s: float = 10) -> bool:
    end = time.monotonic() + limit_s
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(is_alive(pid) for pid in pids)


def test_ctrl_c_during_a_stream_leaves_no_process_and_no_socket() -> None:
    mesh = Mesh("--worker", "replay", "--drain-timeout-s", "1")
    pids = [mesh.pid(name) for name in SERVICES]
    ends: list[str] = []

    def read() -> None:
        body = {
            "model": "glm-nano",
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            **replay("word " * 6000),
        }
        try:
            with httpx.stream(
                "POST", f"{mesh.url}/v1/chat/completions", json=body, timeout=30
            ) as answer:
                ends.extend(line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            ends.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    mesh.until(lambda: mesh.metric("vllm:num_requests_running") > 0, 10, "the stream runs")
    started = time.monotonic()
    try:
        assert mesh.stop(signal.SIGINT) == 0
        assert time.monotonic() - started < 15
        reader.join(10)
        assert ends[-1] == "data: [DONE]"
        assert all_gone(pids)
        assert not list(mesh.run_dir.glob("*.sock"))
        assert "killed" not in mesh.screen, mesh.screen
    finally:
        mesh.remove()


def test_a_killed_launcher_leaves_no_process() -> None:
    mesh = Mesh("--worker", "replay")
    pids = [mesh.pid(name) for name in SERVICES]
    try:
        mesh.stop(signal.SIGKILL)
        assert all_gone(pids, 20)
    finally:
        mesh.remove()


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [GLM_MESH, "up", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"glm-mesh: --port {port} of 127.0.0.1: ")
    assert done.stderr.count("\n") == 1


def test_a_broken_checkpoint_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [GLM_MESH, "up", "--port", "0", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "cannot start with these settings" in done.stdout
    assert str(tmp_path) in done.stdout


def test_a_key_is_asked_for_and_shown_nowhere() -> None:
    mesh = Mesh("--worker", "replay", "--api-key", "hunter2")
    try:
        body = {"model": "glm-nano", "messages": [{"role": "user", "content": "x"}]}
        url = f"{mesh.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=10).status_code == 401
        assert mesh.client(api_key="wrong").with_options is not None
        answer = mesh.client(api_key="hunter2").chat.completions.create(
            model="glm-nano",
            messages=[{"role": "user", "content": "x"}],
            extra_body=replay("ok"),
        )
        assert answer.choices
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in mesh.pids().values()]
        assert all(b"hunter2" not in command for command in commands)
        assert all("hunter2" not in mesh.log(name) for name in SERVICES)
        assert "hunter2" not in mesh.screen
    finally:
        mesh.stop()
        mesh.remove()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_alone_lists_its_flags(service: str) -> None:
    done = subprocess.run(
        [GLM_MESH, service, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    for flag in ("--address", "--health-address", "--admin-address", "--log-level", "--config"):
        assert flag in done.stdout
