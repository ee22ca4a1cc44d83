"""Rules of message lists, beyond the table of test_chat_plan."""

from typing import Any

import pytest

from services.frontend.conversation import (
    check_messages,
    check_tools,
    declared_tools,
    template_arguments,
)
from services.frontend.errors import ApiError
from services.frontend.schemas.chat import ChatRequest
from services.frontend.submission import DeclaredTool
from services.frontend.validation import parse
from shared.glm.dialect import Dialect

USER = {"role": "user", "content": "Hi"}
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "add", "parameters": {"é": [1, None]}}},
]


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "now", "arguments": "{}"}}


def asking(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call(call_id) for call_id in ids]}


def answer(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "x"}


def request(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, {"messages": [USER], **fields})


@pytest.mark.parametrize(
    "messages",
    [
        [asking("a", "b"), answer("b"), answer("a"), USER],
        [asking("a"), answer("a"), asking("a"), answer("a")],
        [asking("a"), answer("a"), answer("a")],
        [{"role": "system", "content": ""}, {"role": "developer", "content": "x"}, USER],
        [USER, {"role": "assistant"}, USER],
        [USER, {"role": "assistant", "content": "", "tool_calls": []}, USER],
        [USER, USER],
    ],
)
def test_sound_conversations_are_taken(messages: list[dict[str, Any]]) -> None:
    assert check_messages(request(messages=messages).messages, messages) == []


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([asking("a", "b"), answer("a"), USER], "messages[2].role", "'b'"),
        ([asking("a"), answer("a"), USER, answer("a")], "messages[3].role", "must follow"),
        ([asking("a"), answer("b")], "messages[1].tool_call_id", "'b'"),
        ([asking("a"), answer("a"), asking("c")], "messages[2].role", "'c'"),
    ],
)
def test_calls_and_answers_must_match(
    messages: list[dict[str, Any]], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        check_messages(request(messages=messages).messages, messages)
    assert caught.value.param == param
    assert words in caught.value.message


def test_arguments_that_a_server_cut_off_are_taken_back() -> None:
    cut = {**call("a"), "function": {"name": "now", "arguments": '{"city": "Par'}}
    messages = [{"role": "assistant", "tool_calls": [cut]}, answer("a")]
    assert check_messages(request(messages=messages).messages, messages) == []


def test_declared_tools_keep_their_schema_as_json() -> None:
    found = declared_tools(request(tools=TOOLS).tools)
    assert found == (
        DeclaredTool(name="now"),
        DeclaredTool(name="add", parameters_json='{"é":[1,null]}'.encode()),
    )
    assert declared_tools(None) == ()


def test_no_tools_is_nothing_to_check() -> None:
    check_tools(None, None)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "low"},
        ),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": None}}, {}),
        (
            {"thinking": {"type": "enabled", "clear_thinking": False}},
            {"enable_thinking": True, "clear_thinking": False},
        ),
        (
            {
                "thinking": {"type": "enabled"},
                "chat_template_kwargs": {"enable_thinking": False},
            },
            {"enable_thinking": False},
        ),
    ],
)
def test_thinking_is_switched_by_body_vendor_field_and_template_arguments(
    dialect: Dialect, fields: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert template_arguments(request(**fields), dialect) == (arguments, [])


def test_template_arguments_that_nobody_reads_are_named(dialect: Dialect) -> None:
    fields = {"chat_template_kwargs": {"foo": {"deep": []}, "enable_thinking": True}}
    arguments, unknown = template_arguments(request(**fields), dialect)
    assert (arguments, unknown) == ({"enable_thinking": True}, ["chat_template_kwargs.foo"])
