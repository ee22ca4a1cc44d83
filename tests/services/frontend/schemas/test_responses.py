import pytest
from pydantic import ValidationError

from services.frontend.schemas.responses import ResponsesRequest


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "n"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "function_call_output", "call_id": "c", "output": []},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    ],
)
def test_every_kind_of_item_is_read(item: dict) -> None:
    request = ResponsesRequest.model_validate({"input": [item]})
    assert isinstance(request.input, list)


def test_no_field_of_chats_alone_is_one_of_responses() -> None:
    assert not {"n", "max_tokens", "messages"} & set(ResponsesRequest.model_fields)


def test_an_item_of_another_type_is_refused() -> None:
    with pytest.raises(ValidationError):
        ResponsesRequest.model_validate({"input": [{"type": "message", "role": "user"}]})
