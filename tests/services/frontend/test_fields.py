"""Fields that no model has."""

import pytest

from services.frontend.errors import ApiError
from services.frontend.fields import (
    CHAT_NOT_SERVED,
    COMPLETION_NOT_SERVED,
    sort_extra,
    unknown_header,
)
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.completions import CompletionRequest
from services.frontend.validation import parse

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("name", sorted(CHAT_NOT_SERVED))
def test_a_known_field_that_is_not_served_is_refused_by_name(name: str) -> None:
    request = parse(ChatRequest, {**CHAT, name: "something"})
    with pytest.raises(ApiError) as caught:
        sort_extra(request, CHAT_NOT_SERVED)
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in CHAT_NOT_SERVED.items() for v in (None, *values)]
)
def test_a_value_that_asks_for_nothing_is_taken(name: str, value: object) -> None:
    assert sort_extra(parse(ChatRequest, {**CHAT, name: value}), CHAT_NOT_SERVED) == []


def test_true_does_not_pass_for_one() -> None:
    with pytest.raises(ApiError):
        sort_extra(parse(ChatRequest, {**CHAT, "best_of": True}), CHAT_NOT_SERVED)


@pytest.mark.parametrize(
    ("model", "listed"),
    [(ChatRequest, CHAT_NOT_SERVED), (CompletionRequest, COMPLETION_NOT_SERVED)],
)
def test_no_field_is_both_served_and_refused(model: type, listed: dict) -> None:
    assert not set(model.model_fields) & set(listed)


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
