"""One value of another type, anywhere in a body: a clean answer that names the place."""

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from tests.services.frontend.test_fuzz import post

VALUES = (None, True, 5, 1.5, 10**30, "zz", [], [5], [[]], {}, {"a": {}}, {"type": []})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "now", "description": "d", "parameters": SCHEMA, "strict": False}
FORMAT = {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}
USER = {"role": "user", "content": "Hi"}
OBJECT = {"type": "json_schema", "json_schema": FORMAT}


def chat(**fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": FUNCTION}]
    return {"messages": [USER], "tools": tools, "max_tokens": 9, **fields}


def response(**fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", **FUNCTION}]
    return {"input": [USER], "tools": tools, "max_output_tokens": 9, **fields}


def message(**fields: Any) -> dict[str, Any]:
    tools = [{"type": "custom", "name": "now", "input_schema": SCHEMA, "strict": True}]
    return {"model": "nano", "max_tokens": 9, "messages": [USER], "tools": tools, **fields}


NAMED = {"type": "function", "function": {"name": "now"}}
FLAT = {"type": "function", "name": "now"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
BODIES = {
    "chat": (
        "/v1/chat/completions",
        chat(
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "reasoning": "r",
                    "tool_calls": [CALL],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "12"},
            ],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NAMED]},
            },
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            thinking={"type": "enabled", "budget_tokens": 5, "clear_thinking": True},
            chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "high"},
            logit_bias={"5": 1},
            metadata={"a": "b"},
        ),
    ),
    "chat, a named tool": ("/v1/chat/completions", chat(tool_choice=NAMED)),
    "chat, a form": ("/v1/chat/completions", chat(response_format=OBJECT)),
    "chat, a tag": (
        "/v1/chat/completions",
        chat(
            response_format={"type": "structural_tag", "format": {"type": "any_text"}},
        ),
    ),
    "chat, structured outputs": (
        "/v1/chat/completions",
        chat(structured_outputs={"json": SCHEMA, "disable_additional_properties": True}),
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "Hi", "response_format": OBJECT, "stream": True,
         "stream_options": {"include_usage": True}},
    ),
    "responses": (
        "/v1/responses",
        response(
            input=[
                USER,
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "a", "annotations": []}],
                },
                {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_text", "text": "12"}],
                },
            ],
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [FLAT]},
            text={"format": {"type": "json_schema", **FORMAT}, "verbosity": "medium"},
            reasoning={"effort": "high", "summary": "auto"},
            include=["message.output_text.logprobs"],
            top_logprobs=1,
            stream=True,
            stream_options={"include_obfuscation": False},
        ),
    ),
    "responses, a named tool": ("/v1/responses", response(tool_choice=FLAT)),
    "messages": (
        "/v1/messages",
        message(
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": "b"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [{"type": "text", "text": "12"}],
                            "is_error": False,
                            "cache_control": {"type": "ephemeral", "ttl": "5m"},
                        }
                    ],
                },
            ],
            system=[{"type": "text", "text": "s"}],
            tool_choice={"type": "tool", "name": "now", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 5, "display": "omitted"},
            output_config={
                "effort": "high",
                "format": {"type": "json_schema", "schema": SCHEMA},
            },
            cache_control={"type": "ephemeral", "ttl": "5m"},
            context_management={"edits": [{"type": "clear_thinking_x", "keep": "all"}]},
            metadata={"user_id": "u"},
        ),
    ),
}  # fmt: skip
COUNTED = {"responses": "/v1/responses/input_tokens", "messages": "/v1/messages/count_tokens"}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, inner in pairs:
        # What stands in a schema the worker says.
        if key not in ("parameters", "schema", "input_schema", "json"):
            yield from places(inner, (*path, key))
        else:
            yield (*path, key)


def changed(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


def written(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path).lstrip(".")


async def faults(app: FastAPI, path: str, body: Any) -> list[str]:
    """What is wrong with the answers to one body, changed in every way."""
    found = []
    for place in places(body):
        for value in VALUES:
            data = json.dumps(changed(body, place, value)).encode()
            status, answer = await post(app, path, data)
            if not (status in (200, 404, 503) or (status == 400 and is_named(answer, place))):
                found.append(f"{written(place)} = {value!r}: {status} {answer.decode()}")
    return found


def is_named(answer: bytes, place: tuple[str | int, ...]) -> bool:
    """Whether an error about a type is about the place, or what is around it or in it."""
    error = json.loads(answer)["error"]
    quoted = re.search(r"Invalid (?:type for )?'([^']+)'", error["message"])
    # Errors of messages have no code.
    is_type = error.get("code") == "invalid_type" or "Invalid type for" in error["message"]
    if quoted is None or not is_type:
        return not is_type
    named, changed_place = quoted[1], written(place)
    assert error.get("param", named) == named
    return named.startswith(changed_place) or changed_place.startswith(named)


@pytest.mark.parametrize("name", BODIES)
def test_a_value_of_another_type_is_no_fault_of_the_server(lone_app: FastAPI, name: str) -> None:
    path, body = BODIES[name]
    assert not asyncio.run(faults(lone_app, path, body))


@pytest.mark.parametrize("name", COUNTED)
def test_so_it_is_where_tokens_are_counted(lone_app: FastAPI, name: str) -> None:
    body = {k: v for k, v in BODIES[name][1].items() if k not in ("stream", "stream_options")}
    assert not asyncio.run(faults(lone_app, COUNTED[name], body))


@pytest.mark.parametrize("name", BODIES)
def test_the_bodies_that_are_changed_are_good(lone_app: FastAPI, name: str) -> None:
    path, body = BODIES[name]
    status, answer = asyncio.run(post(lone_app, path, json.dumps(body).encode()))
    assert status == 503, answer
