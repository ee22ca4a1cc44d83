"""The shape of a chat body."""

import pytest

from services.frontend.errors import ApiError
from services.frontend.schemas.chat import ChatRequest
from services.frontend.validation import parse

USER = {"role": "user", "content": "Hi"}


def test_content_is_text_or_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(ChatRequest, {"messages": [USER, {"role": "user", "content": parts}]})
    assert request.messages[0].content == "Hi"
    second = request.messages[1].content
    assert isinstance(second, list)
    assert [part.text for part in second] == ["a", "b"]


def test_arguments_of_calls_are_text_as_the_server_sent_them() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_all_efforts_are_taken(effort: str) -> None:
    body = {"messages": [USER], "reasoning_effort": effort}
    assert parse(ChatRequest, body).reasoning_effort == effort


def test_unknown_fields_are_kept_aside() -> None:
    request = parse(ChatRequest, {"messages": [{**USER, "name": "Ann"}], "foo": 1})
    assert request.model_extra == {"foo": 1}
    assert request.messages[0].model_extra == {"name": "Ann"}
