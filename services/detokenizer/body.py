"""A call written as a JSON object inside the call tags: a habit from other dialects."""

import json
from typing import Any

from services.detokenizer.schema import strict_json


def read_json_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of `{"name": ..., "arguments": {...}}`, None for anything else."""
    value = _load(text)
    if not isinstance(value, dict):
        return None
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _load(arguments)
    if not isinstance(arguments, dict):
        return None
    return function["name"], json.dumps(arguments, ensure_ascii=False)


def _load(text: str) -> Any:  # noqa: ANN401  (any JSON value)
    """The value of strict JSON that can be written again, else None."""
    return None if strict_json(text) is None else json.loads(text)
