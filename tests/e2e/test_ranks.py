"""A worker of two ranks: the text of one rank, and an end in time when a rank dies or hangs."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import Mesh, is_alive

STEP_TIMEOUT_S = 4.0
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "8")
LIMITS = {
    "GLM_MESH_WORKER_STALL_TIMEOUT_S": "2",
    "GLM_MESH_SCHEDULER_STEP_TIMEOUT_S": str(STEP_TIMEOUT_S),
    "GLM_MESH_SCHEDULER_WORKER_GRACE_S": "60",
}
PROMPTS = ("What is 17 + 25?", "Repeat after me: žluťoučký kůň, 馬, 🐎", "Say hello")


def ask(mesh: Mesh, content: str = PROMPTS[0], **changes: Any) -> dict[str, Any]:
    body = {
        "model": "glm-nano",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 60,
        **changes,
    }
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def answers(mesh: Mesh, prompts: Sequence[str] = PROMPTS) -> list[tuple[str, str]]:
    found = [ask(mesh, prompt) for prompt in prompts]
    return [(one.get("reasoning") or "", one.get("content") or "") for one in found]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Mesh]:
    """Cut over two ranks, with short limits."""
    mesh = Mesh(*FLAGS, "--tensor-parallel-size", "2", environment=LIMITS)
    pids = [mesh.pid(name) for name in ("worker", "worker.1")]
    try:
        yield mesh
    finally:
        pids += [mesh.pid(name) for name in ("worker", "worker.1")]
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen
    assert "s, killed" not in mesh.screen
    assert not any(is_alive(pid) for pid in pids), "a rank outlived its mesh"


class Stream(threading.Thread):
    """A long greedy stream; `at` is called after so many pieces."""

    def __init__(self, mesh: Mesh, at: int, do: Callable[[], None]) -> None:
        super().__init__()
        self.url = f"{mesh.url}/v1/completions"
        self.at, self.do = at, do
        self.pieces: list[str] = []
        self.error = ""
        self.done_at = self.ended_at = 0.0

    def run(self) -> None:
        body = {
            "model": "glm-nano",
            "prompt": "one two three four five six seven eight nine ten",
            "temperature": 0,
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", self.url, json=body, timeout=120) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = self.error or str(event.get("error", ""))
                self.pieces += [choice["text"] for choice in event.get("choices", ())]
                if len(self.pieces) >= self.at and not self.done_at:
                    self.done_at = time.monotonic()
                    self.do()
        self.ended_at = time.monotonic()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def streamed(mesh: Mesh, at: int = 10**9, do: Callable[[], None] = lambda: None) -> Stream:
    stream = Stream(mesh, at, do)
    stream.start()
    return stream


@pytest.mark.parametrize(
    "flags",
    [("-pp", "2"), ("-tp", "2", "-pp", "2", "-ep")],
    ids=["stages", "stages of ranks with experts of their own"],
)
def test_other_layouts_say_the_same(nano: Mesh, flags: tuple[str, ...]) -> None:
    mesh = Mesh(*FLAGS, *flags)
    try:
        assert answers(mesh) == answers(nano)
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen
    assert "s, killed" not in mesh.screen


# Far beyond the 128 positions that a token attends to, and more than one step of those below.
LONG = "\n".join(
    (*(f"key{at}: {at * 37 % 101}" for at in range(60)), "What is the value of key41?")
)


def test_ranks_that_cut_tokens_say_the_same_of_long_prompts_with_drafts(nano: Mesh) -> None:
    """Of 64 tokens a step, so that chunks of one prompt meet decodes of others."""
    cuts = {"enable_dsa_cp": True, "enable_flashcomm1": True}
    drafts = {"method": "deepseek_mtp", "num_speculative_tokens": 2}
    prompts = (*PROMPTS, LONG)
    mesh = Mesh(
        *(*FLAGS, "-tp", "2", "--max-num-batched-tokens", "64"),
        *("--additional-config", json.dumps(cuts), "--speculative-config", json.dumps(drafts)),
    )
    try:
        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(lambda prompt: answers(mesh, [prompt])[0], prompts))
        assert together == answers(nano, prompts)
        assert "steps are not captured" not in mesh.log("worker")
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen
    assert "no effect" not in mesh.screen


@pytest.fixture(scope="module")
def whole_text(two_ranks: Mesh) -> str:
    """The stream that nobody disturbs."""
    whole = streamed(two_ranks)
    whole.join(120)
    return whole.text


def test_two_ranks_say_what_one_says(two_ranks: Mesh, nano: Mesh) -> None:
    assert answers(two_ranks) == answers(nano)
    services = json.loads((two_ranks.run_dir / "mesh.json").read_text())["services"]
    assert set(services["worker.1"]) == {"pid", "log"}
    assert Path(services["worker.1"]["log"]).exists()


@pytest.mark.parametrize("name", ["worker.1", "worker"])
def test_a_killed_rank_ends_its_group_and_the_stream_goes_on_without_a_gap(
    two_ranks: Mesh, whole_text: str, name: str
) -> None:
    two_ranks.until_serving()
    before = {rank: two_ranks.pid(rank) for rank in ("worker", "worker.1")}
    scheduler = two_ranks.pid("scheduler")
    cut = streamed(two_ranks, 20, lambda: os.kill(before[name], signal.SIGKILL))
    cut.join(120)
    assert cut.done_at
    assert not cut.error
    assert cut.text == whole_text
    after = {rank: two_ranks.pid(rank) for rank in before}
    assert not set(before.values()) & set(after.values())
    assert not any(is_alive(pid) for pid in before.values())
    assert two_ranks.pid("scheduler") == scheduler
    number = 0 if name == "worker" else 1
    assert (
        f"{name}, rank {number} (pid {before[name]}) ended: killed by SIGKILL" in two_ranks.screen
    )
    two_ranks.until_serving()
    two_ranks.until_idle()


def test_a_frozen_rank_is_named_and_its_group_started_again(
    two_ranks: Mesh, whole_text: str
) -> None:
    two_ranks.until_serving()
    frozen = two_ranks.pid("worker.1")
    seen_before = len(two_ranks.log("worker"))
    stream = streamed(two_ranks, 20, lambda: os.kill(frozen, signal.SIGSTOP))
    while not stream.done_at:
        time.sleep(0.01)
    two_ranks.until(lambda: not two_ranks.is_serving(), STEP_TIMEOUT_S + 2, "it does not serve")
    two_ranks.until(lambda: not is_alive(frozen), 20, "the frozen rank is ended")
    stream.join(120)
    assert not stream.error
    assert stream.text == whole_text
    told = two_ranks.log("worker")[seen_before:]
    assert "rank 1" in told
    assert "step" in told
    assert "rank 1" in two_ranks.screen
    two_ranks.until_serving()
    assert ask(two_ranks)["content"]
