"""Conversations through the whole mesh: what was computed once is not computed again."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import CompletionUsage

from tests.e2e.mesh import Mesh, running
from tools.nano.tasks import make_task

SIZE = 128
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--block-size", "128")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    yield from running(*FLAGS, environment={"VLLM_SERVER_DEV_MODE": "1"})


@pytest.fixture(scope="module")
def alone() -> Iterator[Mesh]:
    """The same without a cache."""
    yield from running(*FLAGS, "--no-enable-prefix-caching")


def page(seed: int) -> list[dict[str, Any]]:
    """A question about a page of lines: several blocks."""
    return list(make_task("lookup", seed).messages)


def ask(mesh: Mesh, messages: list[dict[str, Any]], **options: Any) -> Any:
    values = {"temperature": 0, "max_tokens": 24, "model": "glm-nano", **options}
    return mesh.client().chat.completions.create(messages=messages, **values)


def cached(usage: CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    return usage.prompt_tokens_details.cached_tokens


def test_the_second_turn_of_a_conversation_reports_cached_tokens(mesh: Mesh) -> None:
    messages = page(100)
    first = ask(mesh, messages)
    assert cached(first.usage) == 0
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "And once more, please."},
    ]
    second = ask(mesh, messages)
    assert cached(second.usage) % SIZE == 0
    # All but the rest of the last block, and what the template writes otherwise in later turns.
    assert cached(second.usage) > first.usage.prompt_tokens - 2 * SIZE
    again = ask(mesh, messages)
    assert cached(again.usage) > cached(second.usage) - SIZE
    assert again.choices[0].message == second.choices[0].message


def test_streams_report_them_too_whoever_ends_the_sequence(mesh: Mesh) -> None:
    messages = page(101)
    whole = ask(mesh, messages)
    assert cached(whole.usage) == 0
    content = whole.choices[0].message.content or ""
    for stop in (None, [content[1:3]] if len(content) > 3 else None):
        stream = ask(mesh, messages, stream=True, stop=stop, stream_options={"include_usage": True})
        usage = [chunk.usage for chunk in stream if chunk.usage][-1]
        assert cached(usage) == (usage.prompt_tokens - 1) // SIZE * SIZE > 0


def counts_at_rest(mesh: Mesh) -> tuple[float, float]:
    """Of queries and of hits, those of all earlier requests among them."""
    # Nothing before had two choices: a page that shows both was made after all of it.
    extra = {"ignore_eos": True}
    with ask(mesh, page(107), n=2, stream=True, max_tokens=2000, extra_body=extra):
        mesh.until(lambda: mesh.metric("vllm:num_requests_running") == 2, 30, "both run")
    mesh.until_idle()
    return (
        mesh.metric("vllm:prefix_cache_queries_total"),
        mesh.metric("vllm:prefix_cache_hits_total"),
    )


def test_choices_of_a_request_compute_its_prompt_once(mesh: Mesh) -> None:
    queries, hits = counts_at_rest(mesh)
    answer = ask(mesh, page(102), n=3, temperature=0.8, seed=1)
    assert len(answer.choices) == 3
    # A prompt counts once, and its first choice computed it.
    assert cached(answer.usage) == 0
    shared = (answer.usage.prompt_tokens - 1) // SIZE * SIZE
    mesh.until(
        lambda: mesh.metric("vllm:prefix_cache_hits_total") - hits == 2 * shared, 10, "two hits"
    )
    looked_up = mesh.metric("vllm:prefix_cache_queries_total") - queries
    assert looked_up == 3 * answer.usage.prompt_tokens
    assert cached(ask(mesh, page(102), n=2).usage) == shared


def test_a_salt_keeps_prompts_apart(mesh: Mesh) -> None:
    def salted(salt: str | None) -> int:
        extra = {"cache_salt": salt} if salt else {}
        return cached(ask(mesh, page(103), extra_body=extra).usage)

    assert salted("a") == 0
    assert salted("b") == 0
    assert salted(None) == 0
    assert salted("a") > 0


def test_a_reset_forgets_what_was_computed(mesh: Mesh) -> None:
    ask(mesh, page(104))
    assert cached(ask(mesh, page(104)).usage) > 0
    response = httpx.post(f"{mesh.url}/reset_prefix_cache", timeout=10)
    assert response.json()["num_blocks"] > 0
    assert cached(ask(mesh, page(104)).usage) == 0
    assert httpx.post(f"{mesh.url}/reset_prefix_cache", timeout=10).status_code == 200
    mesh.until_idle()


def test_answers_are_those_of_a_mesh_without_a_cache(mesh: Mesh, alone: Mesh) -> None:
    """Twice each: the second one finds the first one's blocks, in mid-prompt and beyond."""
    for seed in (105, 106):
        for options in ({}, {"temperature": 0.9, "seed": 5}, {"logprobs": True, "top_logprobs": 2}):
            expected = ask(alone, page(seed), **options)
            assert cached(expected.usage) == 0
            for _ in range(2):
                found = ask(mesh, page(seed), **options)
                assert found.choices == expected.choices
            assert cached(found.usage) > 0
    assert httpx.post(f"{alone.url}/reset_prefix_cache", timeout=10).status_code == 404
