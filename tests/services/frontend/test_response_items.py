"""Input items as chat messages, and errors in the words of the request."""

import itertools
from typing import Any

import pytest

from services.frontend.conversation import check_messages
from services.frontend.errors import ApiError, invalid
from services.frontend.response_items import (
    Wording,
    check_item_types,
    items_of,
    messages_of,
    renamed,
)
from services.frontend.schemas.chat import ChatRequest
from services.frontend.validation import parse

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], **fields}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}


def chat(*items: dict[str, Any], instructions: str | None = None, num_stored: int = 0) -> Any:
    return messages_of(items, instructions=instructions, num_stored=num_stored)


def test_a_text_is_a_message_of_the_user() -> None:
    assert chat(*items_of("Hi")).messages == [USER]


def test_instructions_are_said_first() -> None:
    made = chat(USER, instructions="Be brief.")
    assert made.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert made.origins == ["instructions", "input[0]"]


def test_what_belongs_to_a_turn_of_the_assistant_is_one_message() -> None:
    other = {**CALL, "call_id": "c2"}
    made = chat(USER, thought("a"), thought("b"), said("Look."), CALL, other, OUTPUT, said("12."))
    assert made.messages == [
        USER,
        {
            "role": "assistant",
            "content": "Look.",
            "reasoning": "ab",
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "assistant", "content": "12."},
    ]
    assert made.origins == ["input[0]", "input[1]", "input[6]", "input[7]"]


def test_the_next_thought_or_text_begins_a_turn_of_its_own() -> None:
    made = chat(said("x"), thought("b"), said("y"), said("z"))
    assert [message["content"] for message in made.messages] == ["x", "y", "z"]
    assert made.messages[1]["reasoning"] == "b"


@pytest.mark.parametrize("order", list(itertools.product("crt", repeat=4)), ids="".join)
def test_whatever_a_model_wrote_around_its_calls_is_answered_by_what_follows(
    order: tuple[str, ...],
) -> None:
    """Calls, thoughts and texts in any order, then an answer to each call."""
    items, outputs = [], []
    for i, kind in enumerate(order):
        if kind == "c":
            items.append({**CALL, "call_id": f"c{i}"})
            outputs.append({**OUTPUT, "call_id": f"c{i}"})
        else:
            items.append(thought(f"r{i}") if kind == "r" else said(f"t{i}"))
    made = chat(USER, *items, *outputs, USER)
    raw = {"messages": made.messages}
    check_messages(parse(ChatRequest, raw).messages, made.messages)
    wrote = [m for m in made.messages if m["role"] == "assistant"]
    texts = "".join(m["content"] or "" for m in wrote)
    thoughts = "".join(m.get("reasoning", "") for m in wrote)
    assert texts == "".join(f"t{i}" for i, k in enumerate(order) if k == "t")
    assert thoughts == "".join(f"r{i}" for i, k in enumerate(order) if k == "r")
    assert sum(len(m.get("tool_calls", ())) for m in wrote) == len(outputs)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (thought("a"), "a"),
        ({"type": "reasoning", "encrypted_content": "glm1:w6k="}, "é"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        (thought("a", encrypted_content="glm1:w6k="), "a"),
    ],
)
def test_thinking_comes_back_in_any_form_that_a_server_gave(item: dict, text: str) -> None:
    assert chat(item).messages[0]["reasoning"] == text


@pytest.mark.parametrize("sealed", ["xyz", "glm1:%", "glm1:/w=="])
def test_a_seal_that_is_not_ours_is_refused(sealed: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(USER, {"type": "reasoning", "encrypted_content": sealed})
    assert caught.value.param == "input[1].encrypted_content"


def test_parts_of_every_kind_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert chat({"role": "user", "content": parts}).messages[0]["content"] == "ab"
    assert chat({**OUTPUT, "output": parts}).messages[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("kind", "code"),
    [("web_search_call", "unsupported_value"), ("odd", "invalid_value"), (5, "invalid_value")],
)
def test_kinds_of_items_that_are_not_served_are_named(kind: object, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_item_types([USER, {"type": kind}])
    assert (caught.value.param, caught.value.code) == ("input[1].type", code)


@pytest.mark.parametrize(
    ("param", "renamed_to"),
    [
        ("messages[1].role", "input[4]"),
        ("messages[1].content", "input[4].content"),
        ("messages[1].tool_call_id", "input[4].call_id"),
        ("messages", "input"),
        ("tools[0].function.name", "tools[0].name"),
        ("max_completion_tokens", "max_output_tokens"),
        ("temperature", "temperature"),
        (None, None),
    ],
)
def test_errors_name_the_field_of_the_request(param: str | None, renamed_to: str | None) -> None:
    fields = {"messages": "input", "max_completion_tokens": "max_output_tokens", "tools": "tools"}
    wording = Wording(fields=fields, answer_id="call_id", phrases={})
    error = renamed(invalid(f"Invalid '{param}': no.", param), ["input[0]", "input[4]"], wording)
    assert error.param == renamed_to
    assert error.message == f"Invalid '{renamed_to}': no."


def test_what_is_said_of_messages_is_said_in_words_of_the_request() -> None:
    wording = Wording(fields={}, answer_id="tool_use_id", phrases={"'tool_calls'": "blocks"})
    error = invalid("Invalid 'messages[0].role': no 'tool_calls'.", "messages[0].role")
    found = renamed(error, ["messages[2].content[1]"], wording)
    assert found.message == "Invalid 'messages[2].content[1]': no blocks."
    assert found.param == "messages[2].content[1]"


def test_a_content_is_named_once() -> None:
    wording = Wording(fields={}, answer_id="", phrases={})
    error = invalid("Invalid 'messages[0].content'.", "messages[0].content")
    assert renamed(error, ["messages[2].content"], wording).param == "messages[2].content"
