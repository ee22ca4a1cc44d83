"""From pydantic's faults to OpenAI's errors."""

from typing import Annotated, Any

import pytest
from pydantic import Field

from services.frontend.errors import ApiError
from services.frontend.schemas.fields import StrictModel
from services.frontend.validation import check_depth, parse, path_of, quote


class Inner(StrictModel):
    flag: bool


class Outer(StrictModel):
    count: int = Field(0, ge=1, le=9)
    share: float = Field(0.5, gt=0, lt=1)
    name: str = Field("x", min_length=1, max_length=3)
    items: list[Annotated[int, Field(ge=0)]] = Field([1], min_length=1, max_length=2)
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({"count": 0}, "count", "integer_below_min_value", ">= 1, but got 0"),
        ({"count": 10}, "count", "integer_above_max_value", "<= 9, but got 10"),
        ({"share": 0}, "share", "decimal_below_min_value", "> 0.0, but got 0"),
        ({"share": 1}, "share", "decimal_above_max_value", "< 1.0, but got 1"),
        ({"count": 1.5}, "count", "invalid_type", "expected an integer, got a decimal"),
        ({"count": "1"}, "count", "invalid_type", "got a string"),
        ({"count": True}, "count", "invalid_type", "got a boolean"),
        ({"count": None}, "count", "invalid_type", "got null"),
        ({"name": ""}, "name", "string_below_min_length", "at least 1"),
        ({"name": "abcd"}, "name", "string_above_max_length", "at most 3"),
        ({"items": []}, "items", "empty_array", "at least 1"),
        ({"items": [1, 2, 3]}, "items", "array_above_max_length", "at most 2"),
        ({"items": [1, -1]}, "items[1]", "integer_below_min_value", ">= 0"),
        ({"items": {}}, "items", "invalid_type", "expected an array, got an object"),
        ({"inner": []}, "inner", "invalid_type", "expected an object, got an array"),
        ({"inner": {}}, "inner.flag", "missing_required_parameter", "'inner.flag'"),
        ({"inner": {"flag": 1}}, "inner.flag", "invalid_type", "expected a boolean"),
    ],
)
def test_a_fault_has_openais_code_and_names_its_field(
    body: dict[str, Any], param: str, code: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(Outer, body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert words in caught.value.message
    assert f"'{param}'" in caught.value.message


def test_messages_quote_only_a_short_piece_of_the_input() -> None:
    with pytest.raises(ApiError) as caught:
        parse(Outer, {"count": 10**3000})
    assert len(caught.value.message) < 300
    assert len(quote("x" * 10**6)) < 100


def test_paths_leave_union_tags_out() -> None:
    assert (
        path_of(("messages", 0, "content", "(parts)", 1, "text")) == "messages[0].content[1].text"
    )
    assert path_of(()) is None


@pytest.mark.parametrize(("depth", "is_taken"), [(64, True), (65, False), (5000, False)])
def test_nesting_is_bounded_without_recursion(depth: int, is_taken: bool) -> None:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    if is_taken:
        check_depth(value, "x")
    else:
        with pytest.raises(ApiError, match="deeper than 64"):
            check_depth(value, "x")
