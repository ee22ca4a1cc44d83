"""POST /v1/messages with the SDK: whole, streamed, refused, failed."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.services.frontend.conftest import NAME, Mesh
from tests.services.frontend.fake_detokenizer import TEXT, Behaviour

USER: Any = {"role": "user", "content": "Hi"}


@pytest.fixture
def extra_settings() -> dict[str, Any]:
    return {"api_key": ["secret"]}


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://127.0.0.1:{mesh.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as sdk:
        yield sdk


async def test_the_sdk_reads_a_whole_message(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model=NAME, max_tokens=9, messages=[USER])
    assert message.content[0].type == "text"
    assert message.content[0].text == TEXT
    assert message.stop_reason == "end_turn"


async def test_the_sdk_reads_a_stream(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model=NAME, max_tokens=9, messages=[USER]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == TEXT
    assert final.stop_reason == "end_turn"


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model=NAME, messages=[USER])
    assert counted.input_tokens > 3


async def test_the_sdk_knows_each_error(mesh: Mesh, client: anthropic.AsyncAnthropic) -> None:
    create = client.messages.create
    with pytest.raises(anthropic.NotFoundError, match="gpt-9") as caught:
        await create(model="gpt-9", max_tokens=9, messages=[USER])
    assert caught.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await create(model=NAME, max_tokens=0, messages=[USER])
    bad = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        await bad.messages.create(model=NAME, max_tokens=9, messages=[USER])
    with pytest.raises(anthropic.NotFoundError, match="Unknown request URL"):
        await client.post("/v1/messages/nothing", cast_to=object)


async def test_a_failed_stream_raises_in_the_sdk(
    mesh: Mesh, client: anthropic.AsyncAnthropic
) -> None:
    mesh.fake.behaviour = Behaviour(failure_after=3)
    stream = await client.messages.create(model=NAME, max_tokens=9, messages=[USER], stream=True)
    with pytest.raises(anthropic.APIStatusError, match="scheduler lost"):
        [event async for event in stream]


async def test_a_silent_stream_is_kept_alive_by_pings(mesh: Mesh) -> None:
    mesh.gateway.keeper._keep_alive_s = 0.01  # instead of waiting for long
    mesh.fake.behaviour = Behaviour(silent_after=2)
    body = {"model": NAME, "max_tokens": 9, "messages": [USER], "stream": True}
    headers = {"x-api-key": "secret"}
    async with mesh.http.stream("POST", "/v1/messages", json=body, headers=headers) as answer:
        text = ""
        async for chunk in answer.aiter_text():
            text += chunk
            if "event: ping" in text:
                return
    pytest.fail("no ping came")


async def test_the_sdk_lists_the_models(client: anthropic.AsyncAnthropic) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [NAME, "alias"]
    found = await client.models.retrieve(NAME)
    assert (found.type, found.display_name) == ("model", NAME)
