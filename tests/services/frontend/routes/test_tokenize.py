"""Tokenize and detokenize."""

from typing import Any

import httpx
import pytest

from shared.glm.dialect import Dialect
from tests.services.frontend.conftest import Mesh

USER = {"role": "user", "content": "Hi"}


async def test_a_text_is_counted_and_comes_back(lone: httpx.AsyncClient) -> None:
    text = "Grüße, 汉字 <|user|>"
    answer = (await lone.post("/tokenize", json={"prompt": text})).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    assert "token_strs" not in answer
    back = await lone.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_conversation_costs_what_the_chat_endpoint_submits(mesh: Mesh) -> None:
    fields: dict[str, Any] = {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "reasoning_effort": "none",
    }
    answer = (await mesh.http.post("/tokenize", json=fields)).json()
    await mesh.chat(**fields)
    ids = mesh.fake.submits[0].submit.sequences[0].prompt_token_ids
    assert answer["tokens"] == list(memoryview(ids).cast("I"))


async def test_token_strings_are_the_vocabularys(lone: httpx.AsyncClient, dialect: Dialect) -> None:
    body = {"prompt": "a <think>", "return_token_strs": True}
    answer = (await lone.post("/tokenize", json=body)).json()
    assert answer["token_strs"] == [dialect.token_string(i) for i in answer["tokens"]]
    assert answer["token_strs"][-1] == "<think>"


async def test_texts_longer_than_the_context_are_counted(lone: httpx.AsyncClient) -> None:
    answer = (await lone.post("/tokenize", json={"prompt": "word " * 20_000})).json()
    assert answer["count"] > answer["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [896]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_refused_with_its_field(
    lone: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await lone.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_an_unknown_model_is_not_found(lone: httpx.AsyncClient) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await lone.post(path, json={**body, "model": "x"})).status_code == 404
