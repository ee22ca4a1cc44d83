"""Policies through the whole mesh: planning ahead changes no text, priorities and budgets count."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.mesh import Mesh, running
from tools.nano.tasks import make_task

FLAGS = ("--dtype", "float32", "--num-threads", "1")
DRAFTS = '{"method": "mtp", "num_speculative_tokens": 3}'
SKILLS = ("sums", "lookup", "echo", "json")


@pytest.fixture(scope="module")
def ahead() -> Iterator[Mesh]:
    """One step ahead with drafts, priorities, prompts in pieces, and two seats for everybody."""
    yield from running(
        *FLAGS,
        *("--async-scheduling", "--speculative-config", DRAFTS),
        *("--scheduling-policy", "priority", "--max-num-seqs", "2"),
        *("--max-num-batched-tokens", "64", "--long-prefill-token-threshold", "16"),
    )


async def texts(mesh: Mesh, priorities: bool) -> list[str]:
    """Answers to prompts that are all there at once."""
    url = f"{mesh.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=110) as client:

        async def ask(number: int) -> str:
            extra: dict[str, Any] = {"priority": -number} if priorities else {}
            answer = await client.chat.completions.create(
                model="glm-nano",
                messages=list(make_task(SKILLS[number % len(SKILLS)], 900 + number).messages),
                temperature=0,
                max_tokens=24,
                extra_body=extra,
            )
            message = answer.choices[0].message
            return f"{message.model_extra} {message.content}"

        return await asyncio.gather(*(ask(number) for number in range(6)))


async def test_one_step_ahead_with_displacements_gives_the_same_text(
    nano: Mesh, ahead: Mesh
) -> None:
    assert await texts(ahead, priorities=True) == await texts(nano, priorities=False)
    ahead.until(lambda: ahead.metric("glm_mesh:step_seconds_total") > 0, 10, "steps are counted")


async def test_answers_of_one_token_each_use_up_no_seats(ahead: Mesh) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "glm-nano", "max_tokens": 1}
        asked = (
            client.post(f"{ahead.url}/v1/completions", json=body | {"prompt": f"{number} is"})
            for number in range(30)
        )
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    ahead.until_idle()


def test_a_priority_is_refused_where_nobody_heeds_it(nano: Mesh) -> None:
    body = {"model": "glm-nano", "prompt": "a", "max_tokens": 1, "priority": 1}
    answer = httpx.post(f"{nano.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 409
    assert answer.json()["error"]["param"] == "priority"


def test_a_first_token_that_cannot_come_in_time_is_refused_or_failed(nano: Mesh) -> None:
    body = {"model": "glm-nano", "prompt": "word " * 1200, "max_tokens": 1}
    assert httpx.post(f"{nano.url}/v1/completions", json=body, timeout=60).status_code == 200
    body |= {"first_token_timeout_ms": 1, "prompt": "other " * 1200}
    answer = httpx.post(f"{nano.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code in {429, 504}
    assert "first token" in answer.json()["error"]["message"]
    body["first_token_timeout_ms"] = 0
    answer = httpx.post(f"{nano.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["error"]["param"] == "first_token_timeout_ms"
