"""The body of POST /v1/completions."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from services.frontend.schemas.fields import MAX_LOGPROBS, GenerationFields

DEFAULT_MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 128


def _kind(items: list[Any]) -> type | None:
    """The one type of all items, None when they differ."""
    types = set(map(type, items))
    return types.pop() if len(types) == 1 else None


def check_prompt(value: object) -> object:
    """A text, texts, ids or lists of ids; anything else is a wrong type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError(
            "invalid_type", "expected a string, an array of strings, of ids or of arrays of ids"
        )
    if not value:
        raise PydanticCustomError("empty_array", "expected at least one prompt")
    kind = _kind(value)
    if kind is int:
        return value
    if kind is list:
        for ids in value:
            if not ids:
                raise PydanticCustomError("empty_array", "a prompt has at least one token id")
        if all(_kind(ids) is int for ids in value):
            return _checked_count(value)
    if kind is str:
        return _checked_count(value)
    raise PydanticCustomError(
        "invalid_type", "the array must hold only strings, only ids or only arrays of ids"
    )


def _checked_count(prompts: list[Any]) -> list[Any]:
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError(
            "array_above_max_length",
            "expected at most {limit} prompts, got {count}",
            {"limit": MAX_PROMPTS, "count": len(prompts)},
        )
    return prompts


Prompt = Annotated[
    Any,
    AfterValidator(check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionRequest(GenerationFields):
    """Text to continue; spellings of control tokens in it are control tokens."""

    prompt: Prompt = Field(description=f"One prompt or up to {MAX_PROMPTS}.")
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    max_tokens: int | None = Field(
        None, ge=0, description="Most tokens to generate; 0 with `echo`: the prompt alone."
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives to report per token."
    )
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds none: both values mean the same."
    )
