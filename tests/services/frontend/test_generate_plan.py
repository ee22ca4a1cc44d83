"""Ids in, ids out: what a body may say, and that rendering and generating fit together."""

from typing import Any

import httpx
import pytest

from protos.glm.v1 import detokenizer_pb2
from tests.services.frontend.conftest import NAME, Mesh

ACCEPTED = 503
USER = {"role": "user", "content": "Hi"}
PATH = "/inference/v1/generate"


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": fields}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": None}, "token_ids", "invalid_type"),
    ({"token_ids": []}, "token_ids", "empty_array"),
    ({"token_ids": ["a"]}, "token_ids[0]", "invalid_type"),
    ({"token_ids": [882]}, "token_ids", "invalid_value"),
    ({"token_ids": [-1]}, "token_ids", "invalid_value"),
    ({"token_ids": [5] * 8192}, "token_ids", "context_length_exceeded"),
    (sampling(max_tokens=8192), "token_ids", "context_length_exceeded"),
    (sampling(temperature=3), "sampling_params.temperature", "decimal_above_max_value"),
    (sampling(stop_token_ids=[882]), "sampling_params.stop_token_ids", "invalid_value"),
    (sampling(bad_words=[" "]), "sampling_params.bad_words[0]", "invalid_value"),
    (sampling(min_tokens=5, max_tokens=4), "sampling_params.min_tokens", "invalid_value"),
    (sampling(n=129), "sampling_params.n", "integer_above_max_value"),
    ({"output_mode": "image"}, "output_mode", "invalid_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"priority": 2**31}, "priority", "integer_above_max_value"),
    ({"request_id": "a\r\nb"}, "request_id", "invalid_value"),
    ({"cache_salt": "a/b"}, "cache_salt", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_wrong_is_refused_with_its_field(
    lone: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str
) -> None:
    response = await lone.post(PATH, json={"token_ids": [5, 6], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert f"'{param}'" in error["message"] or code == "context_length_exceeded"


async def test_what_is_right_reaches_the_detokenizer(lone: httpx.AsyncClient) -> None:
    body = {"token_ids": [5], "model": NAME, "stream": True, "stream_options": {}}
    assert (await lone.post(PATH, json=body)).status_code == ACCEPTED


async def test_the_submission_says_what_the_body_said(mesh: Mesh) -> None:
    body = {
        "token_ids": [5, 6], "output_mode": "text", "priority": 3, "cache_salt": "s",
        **sampling(temperature=0, n=2, max_tokens=7, logprobs=3, stop=["x"], seed=5),
    }  # fmt: skip
    await mesh.http.post(PATH, json=body)
    submit = mesh.fake.submits[0].submit
    s, o = submit.sampling, submit.output
    assert len(submit.sequences) == 2
    assert submit.sequences[0].prompt_token_ids == b"\x05\0\0\0\x06\0\0\0"
    assert (s.temperature, s.max_tokens, s.num_logprobs, s.seed) == (0, 7, 3, 5)
    assert o.object_kind == detokenizer_pb2.OBJECT_KIND_TOKENS
    assert (o.include_text, o.include_logprobs, list(o.stop)) == (True, True, ["x"])
    assert (o.parse_reasoning, o.num_choices_per_prompt) == (False, 2)
    assert (submit.priority, submit.cache_salt) == (3, "s")


async def test_a_rendered_chat_generates_what_the_chat_would(mesh: Mesh) -> None:
    chat = {
        "temperature": 0.5, "seed": 5, "stop": ["x"], "logprobs": True, "top_logprobs": 2,
        "max_tokens": 9, "priority": 2, "thinking_token_budget": 4, "bad_words": ["no"], "n": 2,
    }  # fmt: skip
    body = {"model": NAME, "messages": [USER], **chat}
    rendered = await mesh.http.post("/v1/chat/completions/render", json={**body, "odd": 1})
    assert rendered.headers["x-unknown-fields"] == "odd"
    assert not mesh.fake.submits, "rendering asks nobody"
    response = await mesh.http.post(PATH, json=rendered.json())
    assert "x-unknown-fields" not in response.headers
    await mesh.chat(**chat)
    tokens, talk = (s.submit for s in mesh.fake.submits)
    assert tokens.sampling == talk.sampling
    assert tokens.sequences == talk.sequences
    assert tokens.priority == talk.priority
    assert list(tokens.output.stop) == ["x"]


async def test_rendered_prompts_generate_what_the_completion_would(mesh: Mesh) -> None:
    body = {"model": NAME, "prompt": ["a", "b"], "temperature": 0, "seed": 1, "logprobs": 1}
    rendered = (await mesh.http.post("/v1/completions/render", json=body)).json()
    assert len(rendered) == 2
    await mesh.http.post(PATH, json=rendered[1])
    await mesh.complete(**body)
    tokens, text = (s.submit for s in mesh.fake.submits)
    assert tokens.sampling == text.sampling
    assert tokens.sequences[0].prompt_token_ids == text.sequences[1].prompt_token_ids


@pytest.mark.parametrize(("has_ended", "is_bounded"), [(None, True), (True, False), (False, True)])
async def test_a_budget_is_for_a_prompt_that_opens_a_thought(
    mesh: Mesh, has_ended: bool | None, is_bounded: bool
) -> None:
    think = mesh.gateway.dialect.control.think
    body = {"token_ids": [5, think], **sampling(thinking_token_budget=3)}
    await mesh.http.post(PATH, json={**body, "reasoning_ended": has_ended})
    assert mesh.fake.submits[0].submit.sampling.HasField("thinking_budget") is is_bounded


async def test_what_cannot_be_rendered_is_refused(lone: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "robot", "content": "x"}]}
    error = (await lone.post("/v1/chat/completions/render", json=body)).json()["error"]
    assert error["param"] == "messages[0].role"
