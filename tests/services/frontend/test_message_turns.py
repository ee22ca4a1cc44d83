"""Turns as chat messages."""

from typing import Any

import pytest

from services.frontend.errors import ApiError
from services.frontend.message_turns import check_block_types, messages_of, text_of

USE = {"type": "tool_use", "id": "t1", "name": "now", "input": {"b": 1, "a": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "12"}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": content[0] if isinstance(content[0], str) else list(content)}


def made(*turns: dict[str, Any], system: Any = None) -> Any:
    return messages_of(turns, system)[0]


def test_the_system_text_is_said_first() -> None:
    assert made(turn("user", "Hi"), system=[text("a"), text("b")]).messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "Hi"},
    ]
    assert made(turn("user", "Hi"), system="").origins == ["messages[0].content"]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    chat = made(turn("assistant", thinking, text("a"), text("b"), USE))
    assert chat.messages == [
        {
            "role": "assistant",
            "content": "ab",
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "now", "arguments": '{"b":1,"a":"é"}'},
                }
            ],
        }
    ]


def test_results_are_messages_of_their_own_before_the_text() -> None:
    chat = made(turn("user", RESULT, {**RESULT, "tool_use_id": "t2"}, text("and?")))
    assert [message["role"] for message in chat.messages] == ["tool", "tool", "user"]
    assert chat.origins == [
        "messages[0].content[0]",
        "messages[0].content[1]",
        "messages[0].content",
    ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": None}, ""),
        ({"content": [text("a"), text("b")]}, "ab"),
        ({"content": "no", "is_error": True}, "Error: no"),
        ({"content": "Error: no", "is_error": True}, "Error: no"),
        ({"content": "no", "is_error": False}, "no"),
    ],
)
def test_a_result_says_what_the_call_gave(fields: dict[str, Any], content: str) -> None:
    assert made(turn("user", {**RESULT, **fields})).messages[0]["content"] == content


def test_thinking_that_was_hidden_is_left_out_and_named() -> None:
    hidden = {"type": "redacted_thinking", "data": "x"}
    chat, left_out = messages_of([turn("assistant", hidden, text("a"))], None)
    assert chat.messages[0]["content"] == "a"
    assert left_out == ["messages[0].content[0]"]


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([turn("user", text("a"), RESULT)], "messages[0].content[1].type"),
        ([turn("user", USE)], "messages[0].content[0].type"),
        ([turn("system", RESULT)], "messages[0].content[0].type"),
        ([turn("assistant", RESULT)], "messages[0].content[0].type"),
        ([{"role": "user", "content": []}], "messages[0].content"),
    ],
)
def test_blocks_where_they_do_not_belong_are_refused(turns: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages_of(turns, None)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "code"), [("image", "unsupported_value"), ("odd", "invalid_value")]
)
def test_kinds_of_blocks_that_are_not_served_are_named(kind: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_block_types([{"role": "user", "content": [text("a"), {"type": kind}]}])
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1].type", code)


@pytest.mark.parametrize("messages", [None, "x", ["x"], [{"content": "x"}], [{"content": ["x"]}]])
def test_what_is_no_list_of_blocks_is_left_to_the_schema(messages: object) -> None:
    check_block_types(messages)


def test_no_content_is_an_empty_text() -> None:
    assert text_of(None) == ""
