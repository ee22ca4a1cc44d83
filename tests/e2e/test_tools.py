"""A tool call, executed by the client and answered by the model."""

import json
from typing import Any

import pytest

from tests.e2e.mesh import Mesh, replay

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
MARKUP = (
    "Look it up.</think><tool_call>get_forecast"
    '<arg_key>city</arg_key><arg_value>Köln, "Süd" 🌧</arg_value>'
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    "<tool_call>get_time</tool_call>"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_forecast",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
EXPECTED = [("get_forecast", {"city": 'Köln, "Süd" 🌧', "days": 3}), ("get_time", {})]


def test_a_tool_call_is_executed_and_answered(nano: Mesh) -> None:
    client = nano.client()
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Marlow?"}]
    options: dict[str, Any] = {"model": "glm-nano", "tools": [WEATHER], "temperature": 0}
    first = client.chat.completions.create(messages=messages, max_tokens=96, **options).choices[0]
    assert first.finish_reason == "tool_calls"
    calls = first.message.tool_calls
    assert calls
    call: Any = calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Marlow"}

    messages.append(first.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(messages=messages, max_tokens=96, **options).choices[0]
    assert second.finish_reason == "stop"
    assert "sunny" in (second.message.content or "")


@pytest.mark.parametrize("steps", [(1,), (2, 1, 5), (1000,)])
def test_calls_are_the_same_however_the_tokens_come(replayed: Mesh, steps: tuple[int, ...]) -> None:
    answer = replayed.client().chat.completions.create(
        model="glm-nano",
        messages=[{"role": "user", "content": "x"}],
        tools=TOOLS,  # type: ignore[arg-type]  # plain dicts
        extra_body=replay(MARKUP, steps),
    )
    choice = answer.choices[0]
    calls: list[Any] = list(choice.message.tool_calls or ())
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Look it up."  # type: ignore[attr-defined]  # extension
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == EXPECTED
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("steps", [(1,), (3,), (1000,)])
def test_streamed_calls_add_up_to_the_whole(replayed: Mesh, steps: tuple[int, ...]) -> None:
    stream = replayed.client().chat.completions.create(
        model="glm-nano",
        messages=[{"role": "user", "content": "x"}],
        tools=TOOLS,  # type: ignore[arg-type]  # plain dicts
        stream=True,
        extra_body=replay(MARKUP, steps),
    )
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    finish = None
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or ():
                assert delta.function is not None
                names[delta.index] = names.get(delta.index, "") + (delta.function.name or "")
                text = arguments.get(delta.index, "") + (delta.function.arguments or "")
                arguments[delta.index] = text
    assert finish == "tool_calls"
    assert [(names[i], json.loads(arguments[i] or "{}")) for i in sorted(names)] == EXPECTED
