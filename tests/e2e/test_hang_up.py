"""Clients that leave cost nothing."""

import time

import httpx
import pytest

from tests.e2e.mesh import Mesh, replay

LONG = "word " * 4000


def body(mesh: Mesh, **options: object) -> dict[str, object]:
    found: dict[str, object] = {
        "model": "glm-nano",
        "messages": [{"role": "user", "content": "Repeat: a b c"}],
        "ignore_eos": True,
        "max_tokens": 4000,
        "stream": True,
    }
    return {**found, **options}


@pytest.mark.parametrize("kind", ["replayed", "nano"])
def test_a_client_that_hangs_up_leaves_no_block_in_use(
    kind: str, request: pytest.FixtureRequest
) -> None:
    mesh: Mesh = request.getfixturevalue(kind)
    extra = replay(LONG) if kind == "replayed" else {}
    url = f"{mesh.url}/v1/chat/completions"
    with (
        httpx.Client(timeout=30) as client,
        client.stream("POST", url, json=body(mesh, **extra)) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        mesh.until(lambda: mesh.metric("vllm:kv_cache_usage_perc") > 0, 5, "blocks are in use")
    started = time.monotonic()
    mesh.until_idle()
    assert time.monotonic() - started < 3


def test_a_client_that_hangs_up_before_the_answer_counts_too(replayed: Mesh) -> None:
    whole = body(replayed, stream=False, **replay(LONG))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{replayed.url}/v1/chat/completions", json=whole, timeout=0.3)
    replayed.until_idle()


def test_many_clients_that_hang_up_at_any_moment_leave_nothing(replayed: Mesh) -> None:
    url = f"{replayed.url}/v1/chat/completions"
    with httpx.Client(timeout=30) as client:
        for count in range(24):
            with client.stream("POST", url, json=body(replayed, **replay(LONG))) as answer:
                lines = answer.iter_lines()
                for _ in range(count % 5):
                    next(lines)
    replayed.until_idle()
