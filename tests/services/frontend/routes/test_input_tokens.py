import openai
import pytest

from tests.services.frontend.conftest import NAME, Mesh

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


async def test_the_count_is_what_the_response_submits(mesh: Mesh) -> None:
    client = mesh.openai
    options = {"model": NAME, "input": "Hi", "instructions": "Be brief.", "tools": [TOOL]}
    counted = await client.responses.input_tokens.count(**options)
    assert counted.object == "response.input_tokens"
    first = await client.responses.create(**options)
    again = {"model": NAME, "input": "More", "previous_response_id": first.id}
    longer = await client.responses.input_tokens.count(**again)
    await client.responses.create(**again)
    sizes = [len(s.submit.sequences[0].prompt_token_ids) // 4 for s in mesh.fake.submits]
    assert [counted.input_tokens, longer.input_tokens] == sizes


async def test_an_input_longer_than_the_context_is_counted(mesh: Mesh) -> None:
    counted = await mesh.openai.responses.input_tokens.count(model=NAME, input="word " * 9000)
    assert counted.input_tokens > 8192


async def test_what_is_wrong_is_refused_as_the_response_would_be(mesh: Mesh) -> None:
    count = mesh.openai.responses.input_tokens.count
    with pytest.raises(openai.NotFoundError) as caught:
        await count(model="nope", input="Hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        await count(model=NAME, input="Hi", previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as caught_bad:
        await count(model=NAME)
    assert caught_bad.value.param == "input"


async def test_a_field_nobody_knows_is_named(mesh: Mesh) -> None:
    response = await mesh.http.post(
        "/v1/responses/input_tokens", json={"model": NAME, "input": "Hi", "odd": 1}
    )
    assert response.headers["x-unknown-fields"] == "odd"
    assert not mesh.fake.submits
