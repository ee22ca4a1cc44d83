"""The application as a whole: what is routed, and that nothing is left behind."""

import asyncio
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request

from services.frontend.app import _answer_validation, create_app
from services.frontend.gateway import Gateway
from tests.services.frontend.conftest import Mesh
from tests.services.frontend.waits import until


def test_all_endpoints_are_there(lone_gateway: Gateway) -> None:
    paths = set(create_app(lone_gateway).openapi()["paths"])
    assert paths == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model_id}",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items", "/v1/responses/input_tokens", "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render", "/v1/completions/render", "/inference/v1/generate",
        "/tokenize", "/detokenize", "/health", "/ping", "/version", "/metrics",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/responses/resp_1", "DELETE, GET"),
        ("/v1/responses/resp_1/cancel", "POST"),
        ("/v1/responses/resp_1/input_items", "GET"),
        ("/v1/responses/input_tokens", "POST"),
        ("/v1/responses", "POST"),
        ("/v1/models/nano", "GET"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_all_right_ones(
    lone: httpx.AsyncClient, path: str, methods: str
) -> None:
    response = await lone.request("PATCH", path)
    assert response.status_code == 405
    assert response.headers["allow"] == methods


def test_every_method_of_the_document_is_among_those_told(lone_app: FastAPI) -> None:
    async def told(path: str) -> set[str]:
        transport = httpx.ASGITransport(lone_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            response = await client.request("PATCH", path.replace("{", "").replace("}", ""))
        # HEAD goes with GET, and the document need not say so.
        return set(response.headers["allow"].split(", ")) - {"HEAD"}

    for path, methods in lone_app.openapi()["paths"].items():
        assert asyncio.run(told(path)) == {method.upper() for method in methods}, path


async def test_should_the_framework_ever_validate_it_is_a_400() -> None:
    request = Request({"type": "http", "headers": []})
    response = await _answer_validation(request, RequestValidationError([]))
    assert response.status_code == 400
    assert json.loads(response.body)["error"]["type"] == "invalid_request_error"


async def test_a_thousand_requests_leave_no_task_behind(mesh: Mesh) -> None:
    async def some() -> None:
        for number in range(25):
            response = await mesh.complete(stream=bool(number % 2), max_tokens=1)
            assert response.status_code == 200
            assert (await mesh.complete(max_tokens=0)).status_code == 400

    before = len(asyncio.all_tasks())
    await asyncio.gather(*(some() for _ in range(20)))
    gc.collect()
    # Connections of the client's pool may stay open; the requests on them are gone.
    await until(lambda: len(asyncio.all_tasks()) <= before + 1)
    assert mesh.gateway.admission.num_running == 0
    assert mesh.gateway.detokenizers.num_open == 0


class TestOrigins:
    """A gateway that pages of one origin may ask."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"allowed_origins": ["https://a.example"], "api_key": ["secret"]}

    async def test_a_browser_may_ask_whether_it_may_ask_without_a_key(self, mesh: Mesh) -> None:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        response = await mesh.http.options("/v1/chat/completions", headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in response.headers["access-control-allow-methods"]

    async def test_answers_and_refusals_may_be_read_by_that_origin_alone(self, mesh: Mesh) -> None:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b", None)):
            response = await mesh.http.get("/v1/models", headers={"origin": origin})
            assert response.status_code == 401
            assert response.headers.get("access-control-allow-origin") == allowed
        assert "x-request-id" in response.headers["access-control-expose-headers"].split(", ")


async def test_without_origins_no_page_may_read(mesh: Mesh) -> None:
    response = await mesh.http.get("/version", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


class TestKeyFile:
    """A gateway with a file of keys."""

    @pytest.fixture
    def extra_settings(self, tmp_path: Path) -> dict[str, Any]:
        digest = hashlib.sha256(b"secret").hexdigest()
        path = tmp_path / "keys.json"
        path.write_text(json.dumps([{"sha256": digest, "id": "a", "requests_per_minute": 1}]))
        return {"api_key_file": path}

    async def test_a_key_that_asks_too_often_is_told_when_to_come_back(self, mesh: Mesh) -> None:
        headers = {"authorization": "Bearer secret"}
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        answers = [
            await mesh.http.post("/v1/chat/completions", json=body, headers=headers)
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert 50 <= int(answers[1].headers["retry-after"]) <= 60
        assert answers[1].json()["error"]["code"] == "rate_limit_exceeded"
        assert mesh.fake.submits[0].submit.tenant_id == "a"
        assert (await mesh.http.get("/v1/models", headers=headers)).status_code == 200
