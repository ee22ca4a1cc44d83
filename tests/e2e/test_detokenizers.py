"""Two gateways before two detokenizers: one of these is killed under load, bounds of keys hold."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.health import probe
from tests.e2e.mesh import Mesh, replay, running

TEXT = "word " * 400 + "end"
# Takes over a second.
LONG = "word " * 1500
FREE, TIGHT = "sk-free", "sk-tight"
MAX_TIGHT = 3
NUM_EACH = 2
TURNS = [{"role": "user", "content": "Hi"}]
# Path, body, and how a stream of that protocol that lost its detokenizer ends.
PROTOCOLS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/chat/completions", {"messages": TURNS}, '"code": "service_unavailable"'),
    ("/v1/completions", {"prompt": "Hi"}, '"code": "service_unavailable"'),
    ("/v1/responses", {"input": "Hi", "store": False}, '"code": "service_unavailable"'),
    ("/v1/messages", {"messages": TURNS}, '"type": "overloaded_error"'),
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    entries: list[dict[str, Any]] = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest()} for key in (FREE, TIGHT)
    ]
    entries[1]["max_concurrent_requests"] = MAX_TIGHT
    keys.write_text(json.dumps(entries))
    yield from running_with(keys)


def running_with(keys: Path) -> Iterator[Mesh]:
    flags = ("--worker", "replay", "--log-level", "debug")
    counts = ("--api-server-count", "2", "--detokenizer-count", "2")
    environment = {
        "GLM_MESH_FRONTEND_API_KEY_FILE": str(keys),
        "GLM_MESH_FRONTEND_SILENCE_TIMEOUT_S": "3",
    }
    yield from running(*flags, *counts, environment=environment)


class Asker(threading.Thread):
    """One request over a connection of its own."""

    def __init__(
        self,
        mesh: Mesh,
        number: int,
        *,
        key: str = FREE,
        is_stream: bool = False,
        text: str = TEXT,
    ) -> None:
        super().__init__()
        path, body, self.error_mark = PROTOCOLS[number % len(PROTOCOLS)]
        self.url = mesh.url + path
        self.body = {"model": "glm-nano", "max_tokens": 8000, **body, **replay(f"</think>{text}")}
        if path == "/v1/responses":
            self.body["max_output_tokens"] = self.body.pop("max_tokens")
        self.body["stream"] = is_stream
        self.headers = {"authorization": f"Bearer {key}"}
        self.has_begun, self.is_enough = threading.Event(), threading.Event()
        self.status = 0
        self.answer = ""
        self.is_cut = False

    def run(self) -> None:
        try:
            with (
                httpx.Client(timeout=40) as client,
                client.stream("POST", self.url, json=self.body, headers=self.headers) as answer,
            ):
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.answer += piece
                    self.has_begun.set()
                    if self.is_enough.is_set():
                        break
        except httpx.HTTPError:
            self.is_cut = True
        self.has_begun.set()

    @property
    def text(self) -> str:
        """What the model said, in whatever form the protocol has it."""
        if not self.body["stream"]:
            return text_in(json.loads(self.answer))
        lines = [line[6:] for line in self.answer.splitlines() if line.startswith("data: {")]
        return "".join(map(text_in, map(json.loads, lines)))

    @property
    def is_whole(self) -> bool:
        return self.text.endswith(TEXT) and self.text.count("word") == TEXT.count("word")

    @property
    def is_failed(self) -> bool:
        return self.error_mark in self.answer


def text_in(shown: dict[str, Any]) -> str:
    """The text of an answer, or of an event of one."""
    texts = [
        (choice.get("delta") or choice.get("message") or {}).get("content") or choice.get("text")
        for choice in shown.get("choices", ())
    ]
    if shown.get("type") == "response.output_text.delta":
        texts.append(shown["delta"])
    if shown.get("type") == "content_block_delta":
        texts.append(shown["delta"].get("text"))
    for item in shown.get("output", ()):
        texts += [part["text"] for part in item["content"] if item["type"] == "message"]
    if shown.get("type") == "message":
        texts += [block.get("text") for block in shown["content"]]
    return "".join(text or "" for text in texts)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that stands still meanwhile; as long as a worker does, no answer comes to its end.

    That is no fault yet: a step has a minute.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def num_submitted(mesh: Mesh) -> int:
    """Requests that reached a detokenizer so far."""
    return sum(mesh.log(name).count("submitted") for name in ("detokenizer", "detokenizer-1"))


def start(mesh: Mesh, askers: list[Asker]) -> None:
    """Until all of them are with a detokenizer; the worker stands still."""
    before = num_submitted(mesh)
    for asker in askers:
        asker.start()
    mesh.until(lambda: num_submitted(mesh) >= before + len(askers), 30, "all are under way")


@contextlib.contextmanager
def halted(mesh: Mesh, streams: list[Asker]) -> Iterator[None]:
    """Inside every stream has begun, and none goes on or ends: the worker stands still."""
    worker = mesh.pid("worker")
    with frozen(worker):
        start(mesh, streams)
    for asker in streams:
        assert asker.has_begun.wait(30)
    with frozen(worker):
        yield


def holding_all(mesh: Mesh) -> list[Asker]:
    """As many streams as the tight key may have."""
    return [Asker(mesh, 0, key=TIGHT, is_stream=True, text=LONG) for _ in range(MAX_TIGHT)]


def join(askers: list[Asker]) -> None:
    for asker in askers:
        asker.join(60)
        assert not asker.is_alive()


def check(streams: list[Asker], wholes: list[Asker]) -> None:
    """Whole answers are there; a stream goes on, or it ended with its protocol's error."""
    join(wholes)
    assert [asker.status for asker in wholes] == [200] * len(wholes)
    assert all(asker.is_whole for asker in wholes)
    for asker in streams:
        asker.is_enough.set()
    join(streams)
    assert [asker.status for asker in streams] == [200] * len(streams)
    for asker in streams:
        assert not asker.is_cut
        assert f"</think>{LONG}".startswith(asker.text) or LONG.startswith(asker.text)


def test_a_killed_detokenizer_costs_streams_that_began_and_nothing_else(mesh: Mesh) -> None:
    killed, others = "detokenizer-1", ("detokenizer", "frontend", "frontend-1", "scheduler")
    before = {name: mesh.pid(name) for name in (killed, *others)}
    streams = [Asker(mesh, i, is_stream=True, text=LONG) for i in range(4 * NUM_EACH)]
    wholes = [Asker(mesh, i) for i in range(4 * NUM_EACH)]
    with halted(mesh, streams):
        start(mesh, wholes)
        os.kill(before[killed], signal.SIGKILL)
    check(streams, wholes)
    # Both had streams, and both had whole answers to give.
    assert 0 < sum(asker.is_failed for asker in streams) < len(streams)
    assert 0 < mesh.metric("glm_mesh:request_resubmissions_total") < len(wholes)
    mesh.until_idle()

    mesh.until(lambda: mesh.pid(killed) != before[killed], 40, "it is started again")
    mesh.until(lambda: mesh.metric("glm_mesh:num_detokenizers_ready") == 2, 40, "both are ready")
    assert {name: mesh.pid(name) for name in others} == {name: before[name] for name in others}
    size = len(mesh.log(killed))
    again = [Asker(mesh, i) for i in range(8)]
    for asker in again:
        asker.start()
    join(again)
    assert all(asker.is_whole for asker in again)
    assert "submitted" in mesh.log(killed)[size:]
    mesh.until_idle()


def test_a_frozen_detokenizer_is_found_and_its_requests_go_elsewhere(mesh: Mesh) -> None:
    pid = mesh.pid("detokenizer")
    num_before = mesh.metric("glm_mesh:request_resubmissions_total")
    try:
        wholes = [Asker(mesh, i) for i in range(8)]
        streams = [Asker(mesh, i, is_stream=True, text=LONG) for i in range(4)]
        with halted(mesh, streams):
            start(mesh, wholes)
            os.kill(pid, signal.SIGSTOP)
        check(streams, wholes)
        assert mesh.metric("glm_mesh:request_resubmissions_total") > num_before
        mesh.until_idle()
    finally:
        os.kill(pid, signal.SIGCONT)
    mesh.until(lambda: mesh.metric("glm_mesh:num_detokenizers_ready") == 2, 40, "both are ready")
    assert mesh.pid("detokenizer") == pid
    mesh.until_idle()


def test_a_background_response_is_cancelled_wherever_it_runs(mesh: Mesh) -> None:
    body = {"model": "glm-nano", "input": "Hi", "background": True, **replay(f"</think>{LONG}")}
    headers = {"authorization": f"Bearer {FREE}"}
    # Connections of their own: gateway and detokenizer differ from one call to the next.
    for _ in range(4):
        made = httpx.post(f"{mesh.url}/v1/responses", json=body, headers=headers, timeout=30)
        url = f"{mesh.url}/v1/responses/{made.json()['id']}"
        cancelled = httpx.post(f"{url}/cancel", headers=headers, timeout=30)
        assert cancelled.json()["status"] == "cancelled"
    mesh.until_idle()
    assert httpx.get(url, headers=headers, timeout=30).json()["status"] == "cancelled"


def test_a_key_has_its_bound_once_for_both_gateways(mesh: Mesh) -> None:
    holding = holding_all(mesh)
    # Connections of their own: odds of 2 in 2 ** 10 that one gateway gets them all.
    late = [Asker(mesh, 0, key=TIGHT) for _ in range(10)]
    with halted(mesh, holding):
        assert [asker.status for asker in holding] == [200] * len(holding)
        for asker in late:
            asker.start()
        join(late)
        assert [asker.status for asker in late] == [429] * len(late)
        assert all(asker.is_alive() for asker in holding)
    holding[0].is_enough.set()
    join(holding[:1])

    def is_let_in() -> bool:
        asker = Asker(mesh, 1, key=TIGHT)
        asker.run()
        return asker.status == 200

    mesh.until(is_let_in, 20, "a place that was given back is free")
    for asker in holding:
        asker.is_enough.set()
    join(holding)


def test_a_killed_gateway_takes_its_share_of_a_bound_with_it(mesh: Mesh) -> None:
    mesh.until_idle()  # the places of the test before are free
    holding = holding_all(mesh)
    before = mesh.pid("frontend-1")
    with halted(mesh, holding):
        assert [asker.status for asker in holding] == [200] * len(holding)
        os.kill(before, signal.SIGKILL)
    for asker in holding:
        asker.is_enough.set()
    join(holding)
    mesh.until(lambda: mesh.pid("frontend-1") != before, 30, "it is started again")
    # From then on it gets its share of connections.
    health = mesh.address("frontend-1", "health_address")
    mesh.until(lambda: asyncio.run(probe(health)) == "SERVING", 30, "it serves again")
    mesh.until_idle()
    holding = holding_all(mesh)
    with halted(mesh, holding):
        assert [asker.status for asker in holding] == [200] * len(holding)
    for asker in holding:
        asker.is_enough.set()
    join(holding)
