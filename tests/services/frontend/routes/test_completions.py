"""Completions over real sockets, before a fake detokenizer."""

from tests.services.frontend.conftest import NAME, Mesh
from tests.services.frontend.fake_detokenizer import TEXT


async def test_a_whole_answer_passes_through_as_it_came(mesh: Mesh) -> None:
    answer = (await mesh.complete(prompt=["a", "b"])).json()
    assert [choice["text"] for choice in answer["choices"]] == [TEXT, TEXT]
    assert (answer["object"], answer["model"]) == ("text_completion", NAME)
    assert answer["id"].startswith("cmpl-")


async def test_the_sdk_reads_answers_and_streams(mesh: Mesh) -> None:
    async with mesh.openai as client:
        whole = await client.completions.create(model="alias", prompt="Hi", n=2)
        assert [choice.text for choice in whole.choices] == [TEXT, TEXT]
        assert whole.model == NAME
        stream = await client.completions.create(model=NAME, prompt=[5, 6], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
