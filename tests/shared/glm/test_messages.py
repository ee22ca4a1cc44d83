from typing import Any

import pytest

from shared.errors import RequestError
from shared.glm.messages import normalize_messages, parse_arguments


def one(**message: Any) -> dict[str, Any]:
    return normalize_messages([message])[0]


def test_developer_is_system_and_function_is_tool() -> None:
    assert one(role="developer", content="x")["role"] == "system"
    assert one(role="function", name="f", content="x")["role"] == "tool"


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_text_parts_are_joined_in_order_for_every_role(role: str) -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert one(role=role, content=parts)["content"] == "abc"


@pytest.mark.parametrize("extra", [{}, {"content": None}, {"content": ""}])
def test_an_assistant_without_content_keeps_its_calls(extra: dict[str, Any]) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = one(role="assistant", tool_calls=calls, **extra)
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_both_names(name: str) -> None:
    message = one(role="assistant", content="a", **{name: "why"})
    assert message["reasoning_content"] == "why"


def test_only_a_leading_think_block_is_reasoning() -> None:
    assert one(role="assistant", content="<think>r</think>a</think>b") == {
        "role": "assistant",
        "content": "a</think>b",
        "reasoning_content": "r",
    }
    assert "reasoning_content" not in one(role="assistant", content="a<think>r</think>b")
    assert "reasoning_content" not in one(role="user", content="<think>r</think>b")


def test_arguments_keep_order_and_unicode() -> None:
    parsed = parse_arguments('{"b": "é", "a": [1, 2.5]}')
    assert list(parsed.items()) == [("b", "é"), ("a", [1, 2.5])]


@pytest.mark.parametrize("blank", [None, "", "  \n"])
def test_blank_arguments_are_none(blank: str | None) -> None:
    assert parse_arguments(blank) == {}


DEEP = '{"a": ' + "[" * 64 + "]" * 64 + "}"


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": "cut', '{"a": NaN}', '{"a": 1e999}', "[" * 100_000),
        # JSON that no template can write
        *('{"a": "\\ud800"}', '{"\\udc00": 1}', DEEP, '{"a": ' + "9" * 5000 + "}"),
    ],
)
def test_arguments_that_are_no_json_are_shown_whole(text: str) -> None:
    assert parse_arguments(text) == {"arguments": text}


def test_arguments_that_are_no_object_are_shown_as_one_value() -> None:
    assert parse_arguments("[1]") == {"arguments": [1]}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "odd"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "reasoning": 3}, "messages[0].reasoning"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": ""}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ("text", "messages[0]"),
    ],
)
def test_a_refusal_names_the_field(message: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages([message])
    assert caught.value.field == field
