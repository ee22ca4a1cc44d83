"""Any service may die during a stream: the client hears of it, and the mesh comes back."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.mesh import SERVICES, Mesh, replay, running

LONG = "word " * 1_200 + "end"
BODY = {
    "model": "glm-nano",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 7_000,
    **replay(LONG),
}
MAX_SILENCE_S = 2.0
MAX_RESTART_S = 15.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A mesh of its own: the others are not to be killed."""
    yield from running("--worker", "replay")


class Reader:
    """Reads a stream and kills a service in the middle of it."""

    def __init__(self, mesh: Mesh) -> None:
        self.url = f"{mesh.url}/v1/chat/completions"
        self.data: list[str] = []
        self.killed_at = 0.0
        self.longest_silence_s = 0.0
        self.is_cut = False

    def read(self, pid: int) -> None:
        with (
            httpx.Client(timeout=20) as client,
            client.stream("POST", self.url, json={**BODY, "stream": True}) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            try:
                self._read_lines(answer.iter_lines(), pid)
            except httpx.HTTPError:
                self.is_cut = True
        self._note_silence()

    def _read_lines(self, lines: Iterator[str], pid: int) -> None:
        for line in lines:
            if not line.startswith("data: "):
                continue
            self.data.append(line.removeprefix("data: "))
            self._note_silence()
            if len(self.data) == 10:
                os.kill(pid, signal.SIGKILL)
                self._last = self.killed_at = time.monotonic()

    def _note_silence(self) -> None:
        now = time.monotonic()
        if self.killed_at:
            self.longest_silence_s = max(self.longest_silence_s, now - self._last)
        self._last = now

    @property
    def text(self) -> str:
        """The content so far."""
        chunks = [json.loads(data) for data in self.data if data != "[DONE]"]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ())]
        return "".join(
            (delta.get("reasoning") or "") + (delta.get("content") or "") for delta in deltas
        )


class Whole(threading.Thread):
    """The same request without a stream, beside it."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.url = f"{mesh.url}/v1/chat/completions"
        self.status = 0
        self.ended_at = 0.0
        self.error: dict[str, str] = {}
        self.is_cut = False
        self.text = ""

    def run(self) -> None:
        try:
            answer = httpx.post(self.url, json=BODY, timeout=20)
            self.status = answer.status_code
            self.error = answer.json().get("error", {})
            if self.status == 200:
                self.text = answer.json()["choices"][0]["message"]["reasoning"]  # never closed
        except httpx.HTTPError:
            self.is_cut = True
        self.ended_at = time.monotonic()


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_ends_the_stream_in_time_and_comes_back(mesh: Mesh, service: str) -> None:
    mesh.until_serving()
    before = mesh.pids()
    reader = Reader(mesh)
    whole = Whole(mesh)
    whole.start()
    # One that came behind the loss would be refused.
    mesh.until(lambda: mesh.metric("vllm:num_requests_running") > 0, 10, "it is under way")
    reader.read(before[service])
    whole.join(20)
    assert reader.killed_at
    if service == "frontend":
        assert whole.is_cut
    elif service in {"detokenizer", "scheduler"}:
        # Nothing had left, so the frontend submits it again; the detokenizer what is left of it.
        assert (whole.status, whole.text) == (200, LONG)
    elif whole.status == 200:  # the scheduler may go on with a worker that is back in time
        assert service == "worker"
        assert whole.text == LONG
    else:
        assert whole.ended_at - reader.killed_at < MAX_SILENCE_S
        assert (whole.status, whole.error["type"]) == (503, "server_error")
    # A stream of a lost scheduler waits for the next one, which has to start first.
    assert reader.longest_silence_s < (MAX_RESTART_S if service == "scheduler" else MAX_SILENCE_S)
    if service == "frontend":
        assert reader.is_cut  # the socket went with the process
    else:
        assert not reader.is_cut
        assert reader.data[-1] == "[DONE]"
        # The scheduler goes on with a worker that is back in time: then nothing may be missing.
        is_whole = service in {"worker", "scheduler"} and reader.text == LONG
        assert is_whole or '"error"' in reader.data[-2]
        assert is_whole or service != "scheduler"

    mesh.until(lambda: mesh.pid(service) != before[service], 20, f"{service} is started again")
    mesh.until_serving()
    answer = httpx.post(reader.url, json={**BODY, **replay("back again")}, timeout=20)
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
    end = time.monotonic() + 20
    while time.monotonic() < end:
        started = time.monotonic()
        answer = httpx.post(
            f"{mesh.url}/v1/chat/completions", json={**BODY, **replay("ok")}, timeout=10
        )
        seen.add(answer.status_code)
        if answer.status_code == 200:
            break
        assert time.monotonic() - started < MAX_SILENCE_S
        assert answer.json()["error"]["type"] == "server_error"
        time.sleep(0.05)
    assert seen <= {200, 503}
    assert 200 in seen
