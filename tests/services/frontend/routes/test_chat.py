"""Chat completions over real sockets, before a fake detokenizer."""

import asyncio
import json

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
