"""What a prompt is worth: the same numbers as when the model generated it."""

from typing import Any

import pytest

from tests.e2e.mesh import Mesh

ASK: Any = {"model": "glm-nano", "temperature": 0}
# float32; a chunk and single steps add up in different orders.
TOLERANCE = 1e-3


def test_generated_tokens_are_worth_as_a_prompt_what_they_were_as_output(nano: Mesh) -> None:
    client = nano.client()
    prompt = "What is 2 plus 3?"
    wishes = {"return_token_ids": True, "ignore_eos": True}
    made = client.completions.create(
        **ASK, prompt=prompt, max_tokens=150, logprobs=0, extra_body=wishes
    )
    extra = made.choices[0].model_extra or {}
    assert made.choices[0].logprobs is not None
    output = made.choices[0].logprobs.token_logprobs
    ids = extra["prompt_token_ids"] + extra["token_ids"]
    again = client.completions.create(**ASK, prompt=ids, max_tokens=1, echo=True, logprobs=0)
    assert again.choices[0].logprobs is not None
    echoed = again.choices[0].logprobs.token_logprobs
    assert output is not None
    assert echoed is not None
    assert len(echoed) == len(ids) + 1
    assert echoed[0] is None
    assert echoed[len(ids) - len(output) : -1] == pytest.approx(output, abs=TOLERANCE)


def test_a_prompt_alone_is_measured_and_nothing_else(nano: Mesh) -> None:
    client = nano.client()
    ask: Any = {**ASK, "prompt": "The quick brown fox", "echo": True, "logprobs": 0}
    alone = client.completions.create(**ask, max_tokens=0)
    longer = client.completions.create(**ask, max_tokens=1)
    assert alone.choices[0].text == "The quick brown fox"
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs is not None
    assert longer.choices[0].logprobs is not None
    assert longer.choices[0].logprobs.tokens is not None
    assert alone.choices[0].logprobs.tokens == longer.choices[0].logprobs.tokens[:-1]


def test_measuring_a_prompt_changes_no_answer(nano: Mesh) -> None:
    client = nano.client()
    ask: Any = {**ASK, "prompt": "The quick brown fox", "max_tokens": 8}
    plain = client.completions.create(**ask, logprobs=1)
    measured = client.completions.create(**ask, logprobs=1, extra_body={"prompt_logprobs": 2})
    assert measured.choices[0].text == plain.choices[0].text
    assert measured.choices[0].logprobs is not None
    assert plain.choices[0].logprobs is not None
    assert measured.choices[0].logprobs.token_logprobs == pytest.approx(
        plain.choices[0].logprobs.token_logprobs, abs=TOLERANCE
    )
