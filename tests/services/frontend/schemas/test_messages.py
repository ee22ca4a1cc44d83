import pytest
from pydantic import ValidationError

from services.frontend.schemas.messages import CountTokensRequest, MessagesRequest

GOOD = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        {"type": "tool_result", "tool_use_id": "t"},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}]},
    ],
)
def test_every_kind_of_block_is_read(block: dict) -> None:
    turns = [{"role": "assistant", "content": [block]}]
    assert MessagesRequest.model_validate({**GOOD, "messages": turns})
    assert CountTokensRequest.model_validate({"model": "m", "messages": turns})


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_what_the_protocol_requires_is_required(name: str) -> None:
    with pytest.raises(ValidationError):
        MessagesRequest.model_validate({key: GOOD[key] for key in GOOD if key != name})
