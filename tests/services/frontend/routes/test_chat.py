"""Chat completions over real sockets, before a fake detokenizer."""

import json

from tests.services.frontend.conftest import NAME, Mesh
from tests.services.frontend.fake_detokenizer import TEXT


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
