"""What happens to running requests when a rank of a group is killed or frozen."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.e2e.layouts import Way
from tests.e2e.mesh import Mesh, is_alive

# Well above what a step takes on a machine that has more to do.
STALL_TIMEOUT_S: Final = 4.0
STEP_TIMEOUT_S: Final = 8.0
LIMITS: Final = (
    *("--dtype", "float32", "--num-threads", "1"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "96"),
)
SHORT_TIMES: Final = {
    "GLM_MESH_WORKER_STALL_TIMEOUT_S": str(STALL_TIMEOUT_S),
    "GLM_MESH_SCHEDULER_STEP_TIMEOUT_S": str(STEP_TIMEOUT_S),
}
_ENDLESS: Final[dict[str, Any]] = {
    "model": "glm-nano",
    "prompt": "one two three four five six seven eight nine ten",
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 120,
    "return_token_ids": True,
}
# Those that run when a rank is lost; each takes many steps, the last one several for its prompt.
BODIES: Final[tuple[dict[str, Any], ...]] = (
    _ENDLESS,
    _ENDLESS | {"temperature": 1.0, "seed": 4},
    _ENDLESS | {"frequency_penalty": 0.5, "prompt": "one two " * 150},
)


class Stream(threading.Thread):
    """Reads one stream; `do` is called when it has `at` tokens and the others have one."""

    def __init__(
        self,
        mesh: Mesh,
        body: dict[str, Any],
        at: int = 0,
        do: Callable[[], None] | None = None,
        others: Sequence["Stream"] = (),
    ) -> None:
        super().__init__()
        self.url = f"{mesh.url}/v1/completions"
        self.body = {**body, "stream": True}
        self.at, self.do, self.others = at, do, others
        self.token_ids: list[int] = []
        self.error: dict[str, Any] = {}
        self.is_done = False
        self.done_at = self.ended_at = 0.0

    def run(self) -> None:
        with httpx.stream("POST", self.url, json=self.body, timeout=100) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                self.is_done = self.is_done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        self.ended_at = time.monotonic()

    def _take(self, event: dict[str, Any]) -> None:
        self.error = self.error or event.get("error", {})
        for choice in event.get("choices", ()):
            self.token_ids += choice.get("token_ids") or []
        if self.do is None or self.done_at or len(self.token_ids) < self.at:
            return
        # One that came behind the loss would be refused.
        if all(other.token_ids for other in self.others):
            self.done_at = time.monotonic()
            self.do()


def read_all(streams: Sequence[Stream]) -> None:
    """Run streams at once, to their ends."""
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join(110)


@dataclass(frozen=True, slots=True)
class Loss:
    """How a rank is lost."""

    rank: str
    """Its name in the launcher: `worker`, `worker.1`."""
    signal: signal.Signals

    def __str__(self) -> str:
        how = "frozen" if self.signal == signal.SIGSTOP else "killed"
        return f"{self.rank} {how}"


class Group:
    """A mesh whose worker is a group of ranks."""

    def __init__(self, way: Way, environment: dict[str, str] | None = None) -> None:
        variables = {**SHORT_TIMES, **way.environment, **(environment or {})}
        self.mesh = Mesh(*LIMITS, *way.flags, environment=variables)
        self.names = ["worker", *(f"worker.{rank}" for rank in range(1, way.num_ranks))]

    def close(self) -> None:
        """Stop, and see that nothing is left."""
        pids = self.pids().values()
        code = self.mesh.stop()
        self.mesh.remove()
        assert code == 0, self.mesh.screen
        assert "s, killed" not in self.mesh.screen
        assert not any(is_alive(pid) for pid in pids), "a rank outlived its mesh"

    def pids(self) -> dict[str, int]:
        """Of the ranks."""
        return {name: self.mesh.pid(name) for name in self.names}

    def whole(self) -> list[list[int]]:
        """What the streams say when nothing happens."""
        streams = [Stream(self.mesh, body) for body in BODIES]
        read_all(streams)
        assert not any(stream.error for stream in streams)
        assert [len(stream.token_ids) for stream in streams] == [120] * len(BODIES)
        return [stream.token_ids for stream in streams]

    def lose(self, loss: Loss) -> list[Stream]:
        """Start the streams, and lose a rank while they run."""
        pid = self.mesh.pid(loss.rank)
        others = [Stream(self.mesh, body) for body in BODIES[1:]]
        first = Stream(self.mesh, BODIES[0], 20, lambda: os.kill(pid, loss.signal), others)
        streams = [first, *others]
        for stream in reversed(streams):
            stream.start()
        while not first.done_at and first.is_alive():
            time.sleep(0.01)
        assert first.done_at, "it ended before a rank was lost"
        return streams

    def check_back(self, before: dict[str, int]) -> None:
        """Every rank is a new process, and nothing of the old ones is in use."""
        after = self.pids()
        assert not set(before.values()) & set(after.values())
        assert not any(is_alive(pid) for pid in before.values())
        self.mesh.until_serving()
        self.mesh.until_idle()
