"""Any service may die during a stream: the client hears of it, and the mesh comes back."""

import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.mesh import SERVICES, Mesh, replay

LONG = "word " * 30_000
MAX_SILENCE_S = 2.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A mesh of its own: the others are not to be killed."""
    mesh = Mesh("--worker", "replay", "--max-model-len", "65536")
    try:
        yield mesh
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_ends_the_stream_in_time_and_comes_back(mesh: Mesh, service: str) -> None:
    mesh.until_serving()
    before = mesh.pids()
    lines, killed_at = [], 0.0
    body = {
        "model": "glm-nano",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "max_tokens": 30_000,
        **replay(LONG),
    }
    broken = False
    with httpx.Client(timeout=20) as client:
        url = f"{mesh.url}/v1/chat/completions"
        with client.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200
            try:
                for line in answer.iter_lines():
                    lines.append(line)
                    if len(lines) == 10:
                        os.kill(before[service], signal.SIGKILL)
                        killed_at = time.monotonic()
            except httpx.HTTPError:
                broken = True
    assert killed_at, lines
    assert time.monotonic() - killed_at < MAX_SILENCE_S
    data = [line.removeprefix("data: ") for line in lines if line]
    if service == "frontend":
        assert broken  # the socket went with the process
    else:
        assert not broken
        assert data[-1] == "[DONE]"
        assert '"error"' in data[-2]

    mesh.until(lambda: mesh.pid(service) != before[service], 20, f"{service} is started again")
    mesh.until_serving()
    answer = httpx.post(
        f"{mesh.url}/v1/chat/completions",
        json={**body, "stream": False, **replay("back again")},
        timeout=20,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    mesh.until_idle()
    others = set(SERVICES) - {service}
    assert {name: mesh.pid(name) for name in others} == {name: before[name] for name in others}
    assert f"{service} (pid {before[service]}) ended: killed by SIGKILL" in mesh.screen


def test_while_a_service_is_away_requests_get_a_503_at_once(mesh: Mesh) -> None:
    mesh.until_serving()
    stopped = mesh.pid("worker")
    os.kill(stopped, signal.SIGKILL)
    seen = set()
    body = {"model": "glm-nano", "messages": [{"role": "user", "content": "x"}], **replay("ok")}
    end = time.monotonic() + 20
    while time.monotonic() < end:
        started = time.monotonic()
        answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=10)
        seen.add(answer.status_code)
        if answer.status_code == 200:
            break
        assert time.monotonic() - started < MAX_SILENCE_S
        assert answer.json()["error"]["type"] == "server_error"
        time.sleep(0.05)
    assert seen <= {200, 503}
    assert 200 in seen
