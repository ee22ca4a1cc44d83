"""Two schedulers with a model each: the answers of one, whichever of them is lost and how."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import Mesh, is_alive, running

MANY = 16
# Long enough that most of them run when the last one has begun, even seconds later.
NUM_TOKENS, LOST_AT = 300, 2
# Longer than a busy machine keeps a scheduler waiting that is not frozen: it would be lost, too.
SILENCE_S = 4.0
RESTART_S = 40.0

_PLAIN: dict[str, Any] = {"ignore_eos": True, "max_tokens": NUM_TOKENS, "temperature": 0}
# Everything that depends on the place of a token in the output.
# Where a sequence goes on its numbers differ by rounding: with these seeds and this length no draw
# is nearer than 7e-5 to another token, several times what that can shift it (with seed 12 one is).
_KINDS: tuple[dict[str, Any], ...] = (
    _PLAIN,
    _PLAIN | {"temperature": 1.0, "seed": 11},
    _PLAIN | {"temperature": 0.8, "top_p": 0.9, "seed": 17, "logprobs": 1},
    _PLAIN | {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    _PLAIN | {"temperature": 1.0, "seed": 13, "repetition_penalty": 1.2, "min_tokens": 100},
    _PLAIN | {"temperature": 1.0, "seed": 14, "n": 2},
    _PLAIN | {"temperature": 1.0, "seed": 15, "thinking_token_budget": 60, "is_chat": True},
    {"max_tokens": 400, "seed": 16, "structured_outputs": {"regex": "[a-z ]{400}"}},
)


def body_of(number: int) -> dict[str, Any]:
    """The request of a stream; prompts differ from their first token on."""
    kind = dict(_KINDS[number % len(_KINDS)])
    text = f"{number} times: " + "one two three four five " * (1 + number % 4)
    if kind.pop("is_chat", False):
        return {**kind, "messages": [{"role": "user", "content": text}]}
    return {**kind, "prompt": text}


class Stream(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, mesh: Mesh, number: int, client: httpx.Client) -> None:
        super().__init__()
        self.client = client
        body = body_of(number)
        path = "chat/completions" if "messages" in body else "completions"
        self.url = f"{mesh.url}/v1/{path}"
        self.body = body | {"model": "glm-nano", "stream": True, "return_token_ids": True}
        self.body["stream_options"] = {"include_usage": True}
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, Any] = {}
        self.errors: list[Any] = []
        self.is_done = False
        self.longest_silence_s = 0.0

    @property
    def num_tokens(self) -> int:
        """The least that a choice has; 0 before all have begun."""
        counts = [len(choice["ids"]) for choice in self.choices.values()]
        return min(counts, default=0) if len(counts) == self.body.get("n", 1) else 0

    def run(self) -> None:
        last = 0.0
        with self.client.stream("POST", self.url, json=self.body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                now = time.monotonic()
                self.longest_silence_s = max(self.longest_silence_s, now - (last or now))
                last = now
                self.is_done = self.is_done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        self.errors += [event["error"]] if "error" in event else []
        self.usage = event.get("usage") or self.usage
        for entry in event.get("choices", ()):
            choice = self.choices.setdefault(
                entry["index"], {"ids": [], "text": "", "logprobs": [], "end": None}
            )
            delta = entry.get("delta") or {}
            choice["ids"] += entry.get("token_ids") or []
            choice["text"] += entry.get("text") or delta.get("content") or ""
            choice["text"] += delta.get("reasoning") or ""
            choice["logprobs"] += (entry.get("logprobs") or {}).get("tokens") or []
            choice["end"] = entry.get("finish_reason") or choice["end"]

    @property
    def told(self) -> tuple[Any, ...]:
        """Everything that a loss must not change."""
        counts = [self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        return (sorted(self.choices.items()), counts, self.errors, self.is_done)


def read_all(mesh: Mesh, do: Callable[[], None] | None = None) -> list[Stream]:
    """Run all streams at once; `do` something once all of them are under way."""
    # One client: to make one takes longer than a stream needs for its first tokens.
    with httpx.Client(timeout=90, limits=httpx.Limits(max_connections=MANY)) as client:
        streams = [Stream(mesh, number, client) for number in range(MANY)]
        for stream in streams:
            stream.start()
        if do is not None:
            begun = "all have begun"
            mesh.until(lambda: all(s.num_tokens >= LOST_AT for s in streams), 30, begun)
            # On a machine with other things to do the first ones may be through by then.
            num_running = sum(stream.is_alive() for stream in streams)
            assert num_running >= MANY // 2, "most of them ended before the loss"
            do()
        for stream in streams:
            stream.join(100)
    return streams


@pytest.fixture(scope="module")
def two() -> Iterator[Mesh]:
    yield from running(
        *("--dtype", "float32", "--scheduler-count", "2"),
        environment={
            "GLM_MESH_DETOKENIZER_SILENCE_TIMEOUT_S": str(SILENCE_S),
            # Of one prompt; the sixteen go to both then.
            "GLM_MESH_SCHEDULER_MAX_NUM_SEQS": "16",
        },
    )


@pytest.fixture(scope="module")
def undisturbed(nano: Mesh) -> list[tuple[Any, ...]]:
    """What one scheduler answers."""
    told = [stream.told for stream in read_all(nano)]
    assert not any(errors for _, _, errors, _ in told)
    return told


def check_same(streams: list[Stream], undisturbed: list[tuple[Any, ...]]) -> None:
    for number, (stream, told) in enumerate(zip(streams, undisturbed, strict=True)):
        assert stream.told == told, f"stream {number} is not what it would have been"


def counts(mesh: Mesh) -> dict[str, float]:
    names = ("scheduler_losses", "sequence_resubmissions", "unresumed_sequences")
    return {name: mesh.metric(f"glm_mesh:{name}_total") for name in names}


def lose(mesh: Mesh, undisturbed: list[tuple[Any, ...]], number: int, *names: str) -> None:
    """Send a signal to schedulers while all streams run; nobody notices."""
    before, pids = counts(mesh), [mesh.pid(name) for name in names]
    streams = read_all(mesh, lambda: [os.kill(pid, number) for pid in pids] and None)
    check_same(streams, undisturbed)
    # Counts come behind the tokens.
    for name, growth in (("scheduler_losses", len(names)), ("sequence_resubmissions", 1)):
        least = before[name] + growth
        mesh.until(lambda name=name, least=least: counts(mesh)[name] >= least, 10, name)
    after = counts(mesh)
    assert after["scheduler_losses"] - before["scheduler_losses"] == len(names)
    assert after["unresumed_sequences"] == before["unresumed_sequences"]


def until_whole(mesh: Mesh) -> None:
    """Both are there again, and nothing is left of what they ran."""
    mesh.until(
        lambda: mesh.metric("glm_mesh:num_schedulers_reached") == 2, RESTART_S, "both are reached"
    )
    mesh.until(
        lambda: mesh.metric("glm_mesh:replica_is_ready") == 2, RESTART_S, "both have their worker"
    )
    mesh.until_idle()


def test_two_schedulers_say_what_one_says(two: Mesh, undisturbed: list[tuple[Any, ...]]) -> None:
    check_same(read_all(two), undisturbed)
    loads = [two.log(name) for name in ("scheduler", "scheduler-1")]
    assert all("worker opened an epoch" in log for log in loads)
    until_whole(two)


def test_a_text_that_goes_on_returns_to_where_its_start_is_cached(two: Mesh) -> None:
    """By chance alone eight would find it once in 256 times."""
    cached = []
    for number in range(8):
        start = f"{number} of eight: " + "one two three four five six seven " * 40
        for text in (start, start + "and so on"):
            body = {"model": "glm-nano", "prompt": text, "max_tokens": 1}
            usage = httpx.post(f"{two.url}/v1/completions", json=body, timeout=30).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert min(cached) >= 4 * 128, "the blocks that it is ranked by, and more"
    steps = two.values("glm_mesh:replica_steps_total")
    assert len(steps) == 2
    assert min(steps) > 0, "prompts go to both"


@pytest.mark.parametrize(
    "names", [("scheduler",), ("scheduler", "scheduler-1")], ids=["one", "all"]
)
def test_a_killed_scheduler_costs_no_token(
    two: Mesh, undisturbed: list[tuple[Any, ...]], names: tuple[str, ...]
) -> None:
    """Sequences go on at the other one; with both gone, when one is back."""
    before = [two.pid(name) for name in names]
    lose(two, undisturbed, signal.SIGKILL, *names)
    two.until(lambda: not any(map(is_alive, before)), 20, "they are gone")
    until_whole(two)


def test_a_frozen_scheduler_is_left_and_comes_back(
    two: Mesh, undisturbed: list[tuple[Any, ...]]
) -> None:
    pid = two.pid("scheduler-1")
    try:
        lose(two, undisturbed, signal.SIGSTOP, "scheduler-1")
    finally:
        os.kill(pid, signal.SIGCONT)
    until_whole(two)
    assert two.pid("scheduler-1") == pid, "it was frozen, not dead: nobody restarted it"


@pytest.mark.soak
def test_a_scheduler_whose_worker_does_not_come_back_hands_over_to_the_other(
    two: Mesh, undisturbed: list[tuple[Any, ...]]
) -> None:
    """A worker reads its weights for longer than the 1.2 s that a scheduler waits for it."""
    before, pid = counts(two), two.pid("worker.1")
    streams = read_all(two, lambda: os.kill(pid, signal.SIGKILL))
    check_same(streams, undisturbed)
    assert counts(two)["scheduler_losses"] == before["scheduler_losses"]
    two.until(lambda: two.pid("worker.1") != pid, RESTART_S, "it is started again")
    until_whole(two)


@pytest.mark.soak
def test_a_scheduler_that_an_operator_replaces_hands_over_what_it_does_not_finish(
    two: Mesh, undisturbed: list[tuple[Any, ...]]
) -> None:
    before = two.pid("scheduler")
    streams = read_all(two, lambda: os.kill(before, signal.SIGTERM))
    check_same(streams, undisturbed)
    two.until(lambda: two.pid("scheduler") != before, RESTART_S, "it is started again")
    until_whole(two)
