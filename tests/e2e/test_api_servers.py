"""Two HTTP processes on one port: connections are spread, numbers and kept responses are shared."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from shared.health import probe
from tests.e2e.mesh import Mesh, replay, running

NUM_REQUESTS = 24
# Takes longer than what is asked of it here; where that is much, the worker stands still.
LONG = "</think>" + "word " * 7000


@pytest.fixture(scope="module")
def doubled() -> Iterator[Mesh]:
    yield from running("--worker", "replay", "--api-server-count", "2", "--log-level", "debug")


def num_lines(mesh: Mesh, name: str, text: str) -> int:
    """How often a process logged it."""
    return mesh.log(name).count(text)


def ask(mesh: Mesh, **options: Any) -> httpx.Response:
    """One request over a connection of its own."""
    body = {"messages": [{"role": "user", "content": "Hi"}], **replay("</think>Hello"), **options}
    return httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=30)


def test_both_processes_serve_and_count_together(doubled: Mesh) -> None:
    for _ in range(NUM_REQUESTS):
        assert ask(doubled).json()["choices"][0]["message"]["content"] == "Hello"
    doubled.until(
        lambda: doubled.metric("vllm:request_success_total") >= NUM_REQUESTS, 10, "all are counted"
    )
    assert doubled.metric("vllm:request_success_total") == NUM_REQUESTS
    # The kernel spreads connections by their hash: that all go to one has odds of 2 in 2 ** 24.
    for name in ("frontend", "frontend-1"):
        assert num_lines(doubled, name, "POST /v1/chat/completions 200")


def test_a_response_of_one_process_is_known_to_the_other(doubled: Mesh) -> None:
    with doubled.client() as client:
        made = client.responses.create(
            model="glm-nano", input="Hi", extra_body=replay("</think>Hello")
        )
    for _ in range(NUM_REQUESTS):
        with openai.OpenAI(base_url=f"{doubled.url}/v1", api_key="none") as client:
            assert client.responses.retrieve(made.id).output_text == "Hello"


def test_another_mesh_does_not_slip_onto_the_port(doubled: Mesh) -> None:
    port = doubled.url.rsplit(":", 1)[1]
    with pytest.raises(AssertionError, match="choose another with --port"):
        Mesh("--worker", "replay", "--api-server-count", "2", "--port", port)


def respond(mesh: Mesh) -> str:
    """Id of a background response, made over a connection of its own."""
    body = {"input": "Hi", "background": True, **replay(LONG)}
    response = httpx.post(f"{mesh.url}/v1/responses", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def status_of(mesh: Mesh, response_id: str) -> str:
    path = f"{mesh.url}/v1/responses/{response_id}"
    return str(httpx.get(path, timeout=30).json()["status"])


def respond_at_both(mesh: Mesh) -> list[str]:
    """Ids of background responses of which both processes have some."""
    made = "POST /v1/responses 200"
    before = {name: num_lines(mesh, name, made) for name in ("frontend", "frontend-1")}
    ids = [respond(mesh) for _ in range(12)]
    # Odds of 2 in 2 ** 12 that more are asked for than these.
    while not all(num_lines(mesh, name, made) > number for name, number in before.items()):
        ids.append(respond(mesh))
    return ids


def test_background_responses_end_whichever_process_is_asked_or_lost(doubled: Mesh) -> None:
    worker = doubled.pid("worker")
    os.kill(worker, signal.SIGSTOP)  # none ends by itself
    try:
        cancelled = [respond(doubled) for _ in range(4)]
        for name in cancelled:
            path = f"{doubled.url}/v1/responses/{name}/cancel"
            assert httpx.post(path, timeout=30).json()["status"] == "cancelled"
        ids = respond_at_both(doubled)
        lost = doubled.pid("frontend-1")
        os.kill(lost, signal.SIGKILL)
        # Until it is gone its port still takes connections, which the system resets.
        doubled.until(lambda: doubled.pid("frontend-1") != lost, 30, "its loss is known")
        doubled.until(
            lambda: {status_of(doubled, name) for name in ids} >= {"failed"},
            30,
            "what the lost process worked on has failed",
        )
        left = [name for name in ids if status_of(doubled, name) != "failed"]
        assert 0 < len(left) < len(ids)
    finally:
        os.kill(worker, signal.SIGCONT)
    for name in left:
        assert httpx.delete(f"{doubled.url}/v1/responses/{name}", timeout=30).json()["deleted"]
    assert {status_of(doubled, name) for name in cancelled} == {"cancelled"}
    doubled.until_idle()


def test_a_process_that_is_told_to_stop_refuses_nobody(doubled: Mesh) -> None:
    health = doubled.address("frontend-1", "health_address")
    doubled.until(lambda: asyncio.run(probe(health)) == "SERVING", 30, "it is back, if it was lost")
    os.kill(doubled.pid("frontend-1"), signal.SIGTERM)
    for _ in range(NUM_REQUESTS):
        assert ask(doubled).status_code == 200
