"""Rendering needs no mesh behind the gateway; generating asks for the key as well."""

from typing import Any

import httpx
import pytest

from tests.services.frontend.conftest import NAME, Mesh


async def test_a_rendered_chat_has_the_ids_that_tokenize_counts(lone: httpx.AsyncClient) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
    rendered = (await lone.post("/v1/chat/completions/render", json=body)).json()
    counted = (await lone.post("/tokenize", json=body)).json()
    assert rendered["token_ids"] == counted["tokens"]
    assert rendered["reasoning_ended"] is False
    assert rendered["sampling_params"] == {"max_tokens": 8192 - counted["count"]}


async def test_rendered_prompts_come_as_a_list(lone: httpx.AsyncClient) -> None:
    rendered = (await lone.post("/v1/completions/render", json={"prompt": [[5, 6], [7]]})).json()
    assert [one["token_ids"] for one in rendered] == [[5, 6], [7]]


class TestKeys:
    """A gateway with keys."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"api_key": ["secret"]}

    async def test_tokens_need_the_key_too(self, mesh: Mesh) -> None:
        body = {"token_ids": [5]}
        assert (await mesh.http.post("/inference/v1/generate", json=body)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        response = await mesh.http.post("/inference/v1/generate", json=body, headers=headers)
        assert response.status_code == 200
