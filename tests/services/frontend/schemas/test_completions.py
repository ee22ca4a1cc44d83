"""The shape of a completions body."""

from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from services.frontend.schemas.completions import check_prompt


@pytest.mark.parametrize("prompt", ["a", "", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_texts_and_ids_are_taken_as_they_are(prompt: Any) -> None:
    assert check_prompt(prompt) is prompt


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (5, "invalid_type"),
        ([], "empty_array"),
        ([[]], "empty_array"),
        ([[1], []], "empty_array"),
        (["a", 1], "invalid_type"),
        ([[1], "a"], "invalid_type"),
        ([[1, True]], "invalid_type"),
        ([[[1]]], "invalid_type"),
        ([None], "invalid_type"),
        (["a"] * 129, "array_above_max_length"),
        ([[1]] * 129, "array_above_max_length"),
    ],
)
def test_anything_else_has_its_code(prompt: Any, code: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        check_prompt(prompt)
    assert caught.value.type == code


def test_a_long_prompt_of_ids_is_no_list_of_prompts() -> None:
    assert len(check_prompt([1] * 100_000)) == 100_000  # type: ignore[arg-type]  # a list
