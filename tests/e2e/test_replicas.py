"""Several replicas behind one API, apart: requests are spread, and those of a lost one go on."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import Mesh, replay, running

LONG = "word " * 1_200 + "end"
BODY: dict[str, Any] = {
    "model": "glm-nano",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 7_000,
    **replay(LONG),
}


@pytest.fixture(scope="module")
def apart() -> Iterator[Mesh]:
    """Two replicas that need not know of each other."""
    yield from running("--worker", "replay", "--data-parallel-size", "2")


class Reader(threading.Thread):
    """Reads one stream; kills a process once it and all others have begun."""

    def __init__(self, mesh: Mesh, client: httpx.Client) -> None:
        super().__init__()
        self.url = f"{mesh.url}/v1/chat/completions"
        self.client = client
        self.pid = 0
        self.others: list[Reader] = []
        self.num_chunks = 0
        self.text = self.error = ""

    def run(self) -> None:
        body = {**BODY, "stream": True}
        with self.client.stream("POST", self.url, json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = self.error or str(event.get("error", ""))
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    self.text += (delta.get("reasoning") or "") + (delta.get("content") or "")
                self.num_chunks += 1
                if self.pid and all(reader.num_chunks >= 10 for reader in (self, *self.others)):
                    os.kill(self.pid, signal.SIGKILL)
                    self.pid = 0


def read_all(mesh: Mesh, pid: int = 0) -> list[Reader]:
    """Four streams at once, to their ends; a process may be killed while they run."""
    # One client: to make four takes as long as some of the text.
    with httpx.Client(timeout=60) as client:
        first, *others = readers = [Reader(mesh, client) for _ in range(4)]
        first.pid, first.others = pid, others
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(60)
    return readers


def test_requests_are_spread_over_both_replicas(apart: Mesh) -> None:
    readers = read_all(apart)
    assert [reader.text for reader in readers] == [LONG] * 4
    assert apart.address("worker.1") != apart.address("worker")
    assert len(apart.values("glm_mesh:replica_steps_total")) == 2
    apart.until(
        lambda: min(apart.values("glm_mesh:replica_steps_total")) > 100, 10, "both have made steps"
    )


def test_the_streams_of_a_killed_replica_go_on_at_the_other(apart: Mesh) -> None:
    apart.until_serving()
    before = {name: apart.pid(name) for name in ("worker", "worker.1")}
    readers = read_all(apart, before["worker.1"])
    assert not any(reader.error for reader in readers)
    assert [reader.text for reader in readers] == [LONG] * 4
    assert httpx.get(f"{apart.url}/health", timeout=30).status_code == 200
    apart.until(lambda: apart.pid("worker.1") != before["worker.1"], 30, "it is started again")
    assert apart.pid("worker") == before["worker"]
    apart.until_idle()
