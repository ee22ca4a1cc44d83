"""The shape of a tokenize body."""

import pytest

from services.frontend.errors import ApiError
from services.frontend.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from services.frontend.validation import parse


def test_ids_are_integers() -> None:
    assert parse(DetokenizeRequest, {"tokens": [1, 2]}).tokens == [1, 2]
    with pytest.raises(ApiError):
        parse(DetokenizeRequest, {"tokens": ["1"]})


def test_a_conversation_is_checked_later_by_the_chat_rules() -> None:
    assert parse(TokenizeRequest, {"messages": [5]}).messages == [5]
