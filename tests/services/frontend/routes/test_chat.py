"""Chat completions over real sockets, before a fake detokenizer."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from protos.glm.v1 import common_pb2
from tests.services.frontend.conftest import NAME, Mesh
from tests.services.frontend.fake_detokenizer import TEXT, Behaviour


async def test_a_whole_answer_passes_through_as_it_came(mesh: Mesh) -> None:
    response = await mesh.chat()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["id"].startswith("chatcmpl-")


async def test_a_stream_passes_through_as_it_came(mesh: Mesh) -> None:
    response = await mesh.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks if c["choices"]) == TEXT
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_the_sdk_reads_answers_and_streams(mesh: Mesh) -> None:
    async with mesh.openai as client:
        messages = [{"role": "user", "content": "Hi"}]
        whole = await client.chat.completions.create(model=NAME, messages=messages, seed=1)
        assert whole.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(model=NAME, messages=messages, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == TEXT


async def test_the_sdk_raises_errors_with_code_and_param(mesh: Mesh) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with mesh.openai as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=NAME, messages=messages, max_tokens=10_000)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        assert caught.value.request_id
        with pytest.raises(openai.NotFoundError, match="nope"):
            await create(model="nope", messages=messages)
        mesh.fake.behaviour = Behaviour(
            refusal=common_pb2.Failure(reason=common_pb2.FAILURE_REASON_QUEUE_FULL, message="full")
        )
        with pytest.raises(openai.RateLimitError, match="full"):
            await create(model=NAME, messages=messages, stream=True)


async def test_the_sdk_raises_when_a_stream_fails(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(failure_after=2)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")

    async with mesh.openai as client:
        stream = await client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="scheduler lost"):
            await read()
    assert "".join(texts) == "Hello "


async def test_the_sdk_retries_a_full_server_and_gets_its_answer(mesh: Mesh) -> None:
    full = common_pb2.Failure(
        reason=common_pb2.FAILURE_REASON_QUEUE_FULL, message="full", retry_after_ms=20
    )
    mesh.fake.behaviour = Behaviour(refusal=full)
    async with mesh.openai.with_options(max_retries=3) as client:
        asking = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hi"}]
        )
        task = asyncio.create_task(asking)
        await mesh.fake.wait_until(lambda: mesh.fake.submits)
        mesh.fake.behaviour = Behaviour()
        assert (await task).choices[0].message.content == TEXT
    assert len(mesh.fake.submits) >= 2


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": "a", "refusal": "b"}, "ab"),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
            "ab",
        ),
        ({"content": "a", "annotations": [{"type": "url_citation", "url_citation": {}}]}, "a"),
        ({"content": []}, ""),
    ],
)
async def test_what_another_server_said_is_text_of_the_assistant(
    mesh: Mesh, said: dict[str, Any], text: str
) -> None:
    user = {"role": "user", "content": "Hi"}
    for message in (said, {"content": text}):
        response = await mesh.chat(messages=[user, {"role": "assistant", **message}, user])
        assert response.status_code == 200, response.text
        assert "x-unknown-fields" not in response.headers
    first, second = (s.submit.sequences[0].prompt_token_ids for s in mesh.fake.submits)
    assert first == second


async def test_a_call_may_have_given_nothing(mesh: Mesh) -> None:
    user = {"role": "user", "content": "Hi"}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    for content in ([], ""):
        answer = {"role": "tool", "tool_call_id": "c1", "content": content}
        said = {"role": "assistant", "tool_calls": [call]}
        response = await mesh.chat(messages=[user, said, answer])
        assert response.status_code == 200, response.text
    first, second = (s.submit.sequences[0].prompt_token_ids for s in mesh.fake.submits)
    assert first == second


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "Hi", "refusal": "b"}, "messages[0].refusal"),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": "b"}]},
            "messages[0].content[0]",
        ),
        ({"role": "assistant", "refusal": 5}, "messages[0].refusal"),
        ({"role": "assistant", "annotations": ["x"]}, "messages[0].annotations[0]"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
        ({"role": "system", "content": []}, "messages[0].content"),
    ],
)
async def test_who_did_not_refuse_has_no_refusal(
    lone: httpx.AsyncClient, message: dict[str, Any], param: str
) -> None:
    response = await lone.post("/v1/chat/completions", json={"messages": [message]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_an_echo_begins_with_what_was_said_before(mesh: Mesh) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "refusal": "b"}
    fields = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    response = await mesh.chat(messages=[{"role": "user", "content": "Hi"}, said], **fields)
    assert response.status_code == 200, response.text
    assert list(mesh.fake.submits[0].submit.output.echo_texts) == ["ab"]
