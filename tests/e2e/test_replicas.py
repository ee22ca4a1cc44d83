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
    """Reads one stream; kills a process after some chunks."""

    def __init__(self, mesh: Mesh, pid: int = 0) -> None:
        super().__init__()
        self.url = f"{mesh.url}/v1/chat/completions"
        self.pid = pid
        self.text = self.error = ""

    def run(self) -> None:
        num_chunks = 0
        body = {**BODY, "stream": True}
        with httpx.stream("POST", self.url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = self.error or str(event.get("error", ""))
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    self.text += (delta.get("reasoning") or "") + (delta.get("content") or "")
                num_chunks += 1
                if num_chunks == 10 and self.pid:
                    os.kill(self.pid, signal.SIGKILL)


def read_all(readers: list[Reader]) -> None:
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)


def test_requests_are_spread_over_both_replicas(apart: Mesh) -> None:
    readers = [Reader(apart) for _ in range(4)]
    read_all(readers)
    assert [reader.text for reader in readers] == [LONG] * 4
    assert apart.address("worker.1") != apart.address("worker")
    steps = apart.values("glm_mesh:replica_steps_total")
    assert len(steps) == 2
    assert min(steps) > 100


def test_the_streams_of_a_killed_replica_go_on_at_the_other(apart: Mesh) -> None:
    apart.until_serving()
    before = {name: apart.pid(name) for name in ("worker", "worker.1")}
    readers = [Reader(apart, before["worker.1"]), *(Reader(apart) for _ in range(3))]
    read_all(readers)
    assert not any(reader.error for reader in readers)
    assert [reader.text for reader in readers] == [LONG] * 4
    assert apart.is_serving()
    apart.until(lambda: apart.pid("worker.1") != before["worker.1"], 20, "it is started again")
    assert apart.pid("worker") == before["worker"]
    apart.until_idle()
