"""Fields both endpoints share: strict types, null means absent."""

from typing import Any

import pytest

from services.frontend.errors import ApiError
from services.frontend.schemas.fields import GenerationFields
from services.frontend.validation import parse


def test_every_field_may_be_null() -> None:
    request = parse(GenerationFields, dict.fromkeys(GenerationFields.model_fields))
    assert all(value is None for value in request.model_dump().values())


@pytest.mark.parametrize(("stop", "found"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_one_stop_string_is_a_list_of_one(stop: Any, found: list[str]) -> None:
    assert parse(GenerationFields, {"stop": stop}).stop == found


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", ["1", True, [1], {}])
def test_numbers_are_not_made_from_anything_else(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse(GenerationFields, {name: value})
    assert caught.value.code == "invalid_type"


@pytest.mark.parametrize("name", ["n", "seed", "max_tokens", "min_tokens", "top_k"])
@pytest.mark.parametrize("value", ["1", True, 1.0, 1.5])
def test_integers_are_not_made_from_anything_else(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse(GenerationFields, {name: value})
    assert caught.value.code == "invalid_type"
