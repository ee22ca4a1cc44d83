"""An unknown field is named or refused wherever it stands, in every object of rich bodies."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.frontend.conftest import NAME, Mesh

ODD = "odd_field"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
USER = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SHARED: dict[str, Any] = {"metadata": {"k": "v"}, "logit_bias": {"5": 1}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
CHAT: dict[str, Any] = {
    "model": NAME,
    **SHARED,
    "messages": [
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "A"}], "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "R"}]},
        USER,
    ],
    "thinking": {"type": "enabled"},
    "chat_template_kwargs": {"clear_thinking": True},
    "stream": True,
    "stream_options": {"include_usage": True},
}
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "/v1/chat/completions", {**CHAT, "tools": [CHAT_TOOL]}),
    ("form", "/v1/chat/completions", {**CHAT, "response_format": FORM}),
    (
        "named",
        "/v1/chat/completions",
        {
            **CHAT,
            "tools": [CHAT_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    (
        "allowed",
        "/v1/chat/completions",
        {
            **CHAT,
            "tools": [CHAT_TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        },
    ),
    ("structured", "/v1/chat/completions", {**CHAT, "structured_outputs": {"json": SCHEMA}}),
    ("render", "/v1/chat/completions/render", {**CHAT, "tools": [CHAT_TOOL]}),
    (
        "completion",
        "/v1/completions",
        {
            "model": NAME,
            "prompt": "Hi",
            **SHARED,
            "response_format": FORM,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("completion render", "/v1/completions/render", {"model": NAME, "prompt": "Hi", **SHARED}),
    (
        "response",
        "/v1/responses",
        {
            "model": NAME,
            **SHARED,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "s"}],
                    "content": [{"type": "reasoning_text", "text": "r"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "no"}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "R"}],
                },
                {"role": "user", "content": "go on"},
            ],
            "reasoning": {"effort": "high"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "chat_template_kwargs": {"clear_thinking": True},
            "stream": True,
            "stream_options": {"include_obfuscation": False},
        },
    ),
    (
        "response choice",
        "/v1/responses",
        {
            "model": NAME,
            "input": "Hi",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ),
    (
        "response allowed",
        "/v1/responses",
        {
            "model": NAME,
            "input": "Hi",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
        },
    ),
    (
        "message form",
        "/v1/messages",
        {
            "model": NAME,
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "Hi"}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        "generate form",
        "/inference/v1/generate",
        {"token_ids": [5], "sampling_params": {"response_format": FORM}},
    ),
    *(
        (name, path, {**body, **extra})
        for name, path, extra in (
            ("message", "/v1/messages", {"max_tokens": 9, **SHARED}),
            ("count", "/v1/messages/count_tokens", {}),
        )
        for body in [
            {
                "model": NAME,
                "system": [
                    {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
                ],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "t", "signature": "x"},
                            {"type": "text", "text": "A"},
                            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c",
                                "content": [{"type": "text", "text": "R"}],
                                "cache_control": {"type": "ephemeral", "ttl": "5m"},
                            },
                            {"type": "text", "text": "go on"},
                        ],
                    },
                ],
                "tools": [{"name": "f", "input_schema": SCHEMA}],
                "tool_choice": {"type": "auto"},
                "thinking": {"type": "enabled", "budget_tokens": 5},
                "output_config": {"effort": "high"},
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]
                },
            }
        ]
    ),
    (
        "generate",
        "/inference/v1/generate",
        {
            "token_ids": [5, 6],
            "sampling_params": {"logit_bias": {"5": 1}, "structured_outputs": {"json": SCHEMA}},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("tokenize", "/tokenize", {"messages": CHAT["messages"], "tools": [CHAT_TOOL]}),
    ("tokenize text", "/tokenize", {"prompt": "Hi"}),
    ("detokenize", "/detokenize", {"tokens": [5]}),
]
# Objects whose names are the client's own to choose: labels, schemas and arguments of calls.
OPEN = re.compile(
    r"(^|\.)(metadata|parameters|input_schema|schema|structured_outputs\.json)(\.|$)"
    r"|content\[\d+\]\.input$"
)


def objects_in(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all objects."""
    if isinstance(value, dict):
        yield path
        for name, child in value.items():
            yield from objects_in(child, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from objects_in(child, f"{path}[{i}]")


def with_odd_field(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The body with one field more in the object at the path."""
    changed = json.loads(json.dumps(body))
    place: Any = changed
    for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        place = place[name] if name else place[int(number)]
    place[ODD] = 1
    return changed


CASES = [
    pytest.param(url, with_odd_field(body, path), path, id=f"{name} {path or 'top'}")
    for name, url, body in BODIES
    for path in objects_in(body)
]


async def test_rich_bodies_are_taken_without_a_warning(mesh: Mesh) -> None:
    for name, url, body in BODIES:
        response = await mesh.http.post(url, json=body)
        assert response.status_code == 200, (name, response.text)
        assert "x-unknown-fields" not in response.headers, name


async def test_an_unknown_field_is_named_or_refused_in_every_object(mesh: Mesh) -> None:
    wrong = []
    for case in CASES:
        url, body, path = case.values
        response = await mesh.http.post(url, json=body)
        named = f"{path}.{ODD}" if path else ODD
        if OPEN.search(path):
            is_right = "x-unknown-fields" not in response.headers and response.status_code == 200
            is_right |= response.status_code == 400 and ODD in response.text
        elif response.status_code == 200:
            # Names are cut to a length; the header has the beginning of a long one.
            is_right = response.headers.get("x-unknown-fields", "-") == named[:48]
        else:
            param = str(response.json()["error"].get("param", named))
            is_right = response.status_code == 400 and (param == named or ODD in response.text)
        if not is_right:
            wrong.append((case.id, response.status_code, response.headers.get("x-unknown-fields")))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(CASES) > 100
