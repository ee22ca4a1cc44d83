"""What a user of the SDK does first, on the trained checkpoint."""

import asyncio
from typing import Any

import openai
import pytest

from tests.e2e.mesh import Mesh, replay

WORDS = "alpha beta gamma delta"
QUESTION = f"Repeat: {WORDS}"
GREEDY = {"temperature": 0.0, "max_tokens": 96}


def ask(
    mesh: Mesh, question: str = QUESTION, **options: object
) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": question}]
    return mesh.client().chat.completions.create(  # type: ignore[call-overload,no-any-return]  # options vary
        model="glm-nano", messages=messages, **{**GREEDY, **options}
    )


def test_the_model_is_listed(nano: Mesh) -> None:
    assert [model.id for model in nano.client().models.list()] == ["glm-nano"]
    assert nano.client().models.retrieve("glm-nano").id == "glm-nano"


def test_a_chat_is_answered_with_its_reasoning_apart(nano: Mesh) -> None:
    answer = ask(nano)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == WORDS
    assert choice.message.reasoning_content == "Repeat the text."  # type: ignore[attr-defined]  # extension
    assert choice.message.reasoning == choice.message.reasoning_content  # type: ignore[attr-defined]  # extension
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_one_answer(nano: Mesh) -> None:
    whole = ask(nano)
    content, reasoning, finish, usage = "", "", None, None
    stream = nano.client().chat.completions.create(
        model="glm-nano",
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        max_tokens=96,
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    assert content == (whole.choices[0].message.content or "")
    assert reasoning == whole.choices[0].message.reasoning_content  # type: ignore[attr-defined]  # extension
    assert finish == whole.choices[0].finish_reason
    assert usage == whole.usage


def test_thinking_can_be_switched_off(nano: Mesh) -> None:
    answer = ask(nano, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    message = answer.choices[0].message
    assert not getattr(message, "reasoning_content", None)
    assert message.content


def test_a_completion_continues_text(nano: Mesh) -> None:
    answer = nano.client().completions.create(
        model="glm-nano", prompt="one two three", max_tokens=8, temperature=0, echo=False
    )
    assert answer.choices[0].finish_reason in {"length", "stop"}
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8


def test_logprobs_come_per_token_with_alternatives(nano: Mesh) -> None:
    answer = ask(nano, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]
        assert best.logprob >= entry.top_logprobs[1].logprob
        assert (entry.token, entry.logprob) == (best.token, best.logprob)  # greedy


def test_a_stop_string_ends_the_models_answer(nano: Mesh) -> None:
    choice = ask(nano, stop=["gamma"]).choices[0]
    assert choice.finish_reason == "stop"
    assert (choice.message.content or "").strip() == "alpha beta"


@pytest.mark.parametrize("steps", [(1,), (3, 2), (1000,)])
@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_is_found_across_tokens_and_not_in_the_reasoning(
    replayed: Mesh, steps: tuple[int, ...], is_included: bool
) -> None:
    body = replay(f"a gamma here</think>{WORDS} and more", steps)
    choice = ask(
        replayed, stop=["gam"], extra_body={**body, "include_stop_str_in_output": is_included}
    ).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == ("alpha beta gam" if is_included else "alpha beta ")
    assert choice.message.reasoning_content == "a gamma here"  # type: ignore[attr-defined]  # extension


def babble(mesh: Mesh, **options: Any) -> list[str]:
    """Text that depends on chance: hot, and on no subject the model knows."""
    answer = mesh.client().completions.create(
        model="glm-nano",
        prompt="one two three",
        temperature=2.0,
        top_p=1.0,
        max_tokens=24,
        extra_body={"ignore_eos": True},
        **options,
    )
    return [choice.text for choice in answer.choices]


def test_one_seed_gives_one_text_whatever_else_runs(nano: Mesh) -> None:
    def sampled(seed: int) -> list[str]:
        return babble(nano, seed=seed, n=1)

    async def crowd() -> None:
        client = openai.AsyncOpenAI(base_url=f"{nano.url}/v1", api_key="none", max_retries=0)
        async with client:
            await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="glm-nano",
                        messages=[{"role": "user", "content": f"Repeat: {n} words"}],
                        max_tokens=24,
                    )
                    for n in range(6)
                )
            )

    alone = sampled(7)
    noise = asyncio.new_event_loop()
    try:
        future = noise.run_in_executor(None, asyncio.run, crowd())
        assert sampled(7) == alone
        noise.run_until_complete(future)
    finally:
        noise.close()
    assert any(sampled(seed) != alone for seed in (8, 9, 10))


def test_several_choices_differ_by_their_own_randomness(nano: Mesh) -> None:
    texts = babble(nano, n=3, seed=1)
    assert len(set(texts)) == 3
    assert babble(nano, n=3, seed=1) == texts


async def test_32_requests_at_once_get_their_own_answers(nano: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{nano.url}/v1", api_key="none", timeout=90) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="glm-nano",
                    messages=[{"role": "user", "content": f"Repeat: number {n}"}],
                    temperature=0,
                    max_tokens=64,
                )
                for n in range(100, 132)
            )
        )
    contents = [answer.choices[0].message.content for answer in answers]
    right = sum(content == f"number {n}" for n, content in enumerate(contents, 100))
    assert right >= 28, contents
    nano.until_idle()


async def test_32_requests_at_once_do_not_mix(replayed: Mesh) -> None:
    url = f"{replayed.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=60) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="glm-nano",
                    messages=[{"role": "user", "content": "x"}],
                    extra_body=replay(f"{n}</think>{f'number {n} ' * n}", (1 + n % 3,)),
                )
                for n in range(1, 33)
            )
        )
    for n, answer in enumerate(answers, 1):
        message = answer.choices[0].message
        assert message.reasoning_content == str(n)  # type: ignore[attr-defined]  # extension
        assert (message.content or "").split() == f"number {n} ".split() * n
    replayed.until_idle()


def test_max_tokens_ends_with_length(nano: Mesh) -> None:
    answer = ask(nano, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
