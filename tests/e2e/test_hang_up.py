"""Clients that leave cost nothing."""

import asyncio
import contextlib
import random

import httpx
import pytest

from tests.e2e.mesh import Mesh, replay

LONG = "word " * 4000


def body(mesh: Mesh, **options: object) -> dict[str, object]:
    found: dict[str, object] = {
        "model": "glm-nano",
        "messages": [{"role": "user", "content": "Repeat: a b c"}],
        "ignore_eos": True,
        "max_tokens": 8000,
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
    mesh.until_idle()
    num_tokens = mesh.metric("vllm:generation_tokens_total")  # of those that came to their end
    num_gone = mesh.metric("glm_mesh:client_disconnects_total")
    with (
        httpx.Client(timeout=30) as client,
        client.stream("POST", url, json=body(mesh, **extra)) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        mesh.until(lambda: mesh.metric("vllm:kv_cache_usage_perc") > 0, 20, "blocks are in use")
    mesh.until(
        lambda: mesh.metric("glm_mesh:client_disconnects_total") > num_gone, 20, "it is noticed"
    )
    mesh.until_idle()
    assert mesh.metric("vllm:generation_tokens_total") == num_tokens


def test_a_client_that_hangs_up_before_the_answer_counts_too(replayed: Mesh) -> None:
    whole = body(replayed, stream=False, **replay(LONG))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{replayed.url}/v1/chat/completions", json=whole, timeout=0.3)
    replayed.until_idle()


async def test_many_clients_that_hang_up_at_any_moment_leave_nothing(replayed: Mesh) -> None:
    rng = random.Random(7)
    url = f"{replayed.url}/v1/chat/completions"
    slots = asyncio.Semaphore(16)
    served = body(replayed, ignore_eos=False, **replay("served"))

    async with httpx.AsyncClient(timeout=30) as client:

        async def leave(after_s: float, *, is_stream: bool) -> None:
            async with slots:
                sending = client.post(url, json=body(replayed, stream=is_stream, **replay(LONG)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(sending, after_s)

        async def stay() -> None:
            async with slots:
                answer = await client.post(url, json={**served, "stream": False})
                assert answer.json()["choices"][0]["message"]["reasoning"] == "served"

        async with asyncio.TaskGroup() as tasks:
            for number in range(160):
                tasks.create_task(leave(rng.uniform(0.001, 0.15), is_stream=bool(number % 2)))
                if number % 8 == 0:
                    tasks.create_task(stay())
    replayed.until_idle()
