"""The application as a whole: what is routed, and that nothing is left behind."""

import asyncio
import gc
import json

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request

from services.frontend.app import _answer_validation, create_app
from services.frontend.gateway import Gateway
from tests.services.frontend.conftest import Mesh


def test_all_endpoints_are_there(lone_gateway: Gateway) -> None:
    paths = set(create_app(lone_gateway).openapi()["paths"])
    assert paths == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model_id}",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/chat/completions/render", "/v1/completions/render", "/inference/v1/generate",
        "/tokenize", "/detokenize", "/health", "/ping", "/version", "/metrics",
    }  # fmt: skip


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
    await asyncio.sleep(0.05)
    gc.collect()
    # Connections of the client's pool may stay open; the requests on them are gone.
    assert len(asyncio.all_tasks()) <= before + 1
    assert mesh.gateway.admission.num_running == 0
    assert mesh.gateway.client.num_open == 0
