"""Fields that no model has."""

import pytest

from services.frontend.errors import ApiError
from services.frontend.fields import sort_extra, unknown_header
from services.frontend.not_served import CHAT_NOT_SERVED
from services.frontend.schemas.chat import ChatRequest
from services.frontend.validation import parse

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_true_does_not_pass_for_one() -> None:
    with pytest.raises(ApiError):
        sort_extra(parse(ChatRequest, {**CHAT, "best_of": True}), CHAT_NOT_SERVED)


def test_unknown_fields_are_listed_with_their_path() -> None:
    request = parse(ChatRequest, {**CHAT, "foo": 1, "bar": None, "store": None})
    assert sort_extra(request, CHAT_NOT_SERVED, "x.") == ["x.foo"]
    assert sort_extra(None, {}) == []


@pytest.mark.parametrize(
    ("names", "header"),
    [
        (["foo", "messages[0].name"], "foo, messages[0].name"),
        (["a\r\nset-cookie: x"], "a%0D%0Aset-cookie%3A%20x"),
        (["é,b"], "%C3%A9%2Cb"),
        (["x" * 99], "x" * 48),
    ],
)
def test_the_header_is_safe_for_any_name(names: list[str], header: str) -> None:
    assert unknown_header(names) == {"x-unknown-fields": header}


def test_the_header_is_short_and_absent_without_names() -> None:
    assert unknown_header([]) == {}
    many = unknown_header([f"f{i}" for i in range(40)])["x-unknown-fields"]
    assert many.endswith("and-24-more")
