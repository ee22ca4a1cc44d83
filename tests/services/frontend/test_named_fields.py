"""Nothing that a client sends is ignored silently, however deep it stands: the header names it."""

from typing import Any

import httpx
import pytest

from tests.services.frontend.conftest import NAME, Mesh

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
ANSWER = {"role": "tool", "tool_call_id": "c", "content": "r"}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{**USER, "odd": 1}]}, "messages[0].odd"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}]},
        "messages[0].content[0].odd",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, ANSWER]},
        "messages[1].tool_calls[0].index",
    ),
    ({"tools": [{**TOOL, "odd": 1}]}, "tools[0].odd"),
    ({"tools": [{"type": "function", "function": {"name": "f", "odd": 1}}]},
     "tools[0].function.odd"),
    ({"tools": [TOOL], "tool_choice": {**TOOL, "odd": 1}}, "tool_choice.odd"),
    ({"thinking": {"type": "enabled", "odd": 1}}, "thinking.odd"),
    ({"response_format": {"type": "text", "odd": 1}}, "response_format.odd"),
    ({"response_format": {**FORM, "odd": 1}}, "response_format.odd"),
    (
        {"response_format": {**FORM, "json_schema": {**FORM["json_schema"], "odd": 1}}},
        "response_format.json_schema.odd",
    ),
    ({"structured_outputs": {"regex": "a", "odd": 1}}, "structured_outputs.odd"),
    ({"chat_template_kwargs": {"odd": 1}}, "chat_template_kwargs.odd"),
    ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
]  # fmt: skip
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"system": [{"type": "text", "text": "a", "odd": 1}]}, "system[0].odd"),
    ({"tools": [{"name": "f", "input_schema": {}, "odd": 1}]}, "tools[0].odd"),
    ({"context_management": {"odd": 1}}, "context_management.odd"),
    ({"output_config": {"odd": 1}}, "output_config.odd"),
    ({"structured_outputs": {"regex": "a", "odd": 1}}, "structured_outputs.odd"),
]


@pytest.mark.parametrize(("fields", "path"), CHATS, ids=[path for _, path in CHATS])
async def test_a_field_nobody_knows_is_named_at_any_depth_of_a_chat(
    mesh: Mesh, fields: dict[str, Any], path: str
) -> None:
    body = {"model": NAME, "messages": [USER], **fields}
    response = await mesh.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-unknown-fields"] == path
    if "tool_choice" not in fields:  # calls that are constrained are not rendered
        rendered = await mesh.http.post("/v1/chat/completions/render", json=body)
        assert rendered.headers["x-unknown-fields"] == path


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"response_format": {"type": "text", "odd": 1}}, "response_format.odd"),
        ({"structured_outputs": {"regex": "a", "odd": 1}}, "structured_outputs.odd"),
    ],
)
async def test_so_it_is_in_completions(mesh: Mesh, fields: dict[str, Any], path: str) -> None:
    response = await mesh.complete(**fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-unknown-fields"] == path


@pytest.mark.parametrize(("fields", "path"), MESSAGES, ids=[path for _, path in MESSAGES])
async def test_so_it_is_in_messages(mesh: Mesh, fields: dict[str, Any], path: str) -> None:
    body = {"model": NAME, "max_tokens": 5, "messages": [USER], **fields}
    response = await mesh.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-unknown-fields"] == path


async def test_so_it_is_in_responses(mesh: Mesh) -> None:
    body = {"model": NAME, "input": "Hi", "structured_outputs": {"regex": "a", "odd": 1}}
    response = await mesh.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-unknown-fields"] == "structured_outputs.odd"


async def test_what_clients_send_as_it_came_is_not_named(mesh: Mesh) -> None:
    said = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    said |= {"audio": None, "function_call": None, "reasoning": "R", "tool_calls": [CALL]}
    response = await mesh.chat(messages=[USER, said, ANSWER])
    assert response.status_code == 200, response.text
    assert "x-unknown-fields" not in response.headers


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}, "thinking_token_budget": 3}, 3),
        ({"thinking": {"type": "enabled"}, "thinking_token_budget": 3}, 3),
    ],
)
async def test_a_budget_of_thinking_counts_by_either_name(
    mesh: Mesh, fields: dict[str, Any], budget: int
) -> None:
    assert (await mesh.chat(**fields)).status_code == 200
    assert mesh.fake.submits[0].submit.sampling.thinking_budget.max_tokens == budget


async def test_a_server_held_thread_is_refused_so_that_the_sdk_goes_on_without(
    lone: httpx.AsyncClient,
) -> None:
    body = {"model": NAME, "max_tokens": 5, "messages": [USER], "thread": {"type": "create"}}
    response = await lone.post("/v1/messages", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "thread" in error["message"]
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert (await lone.post("/v1/messages", json={**body, "thread": None})).status_code == 503
