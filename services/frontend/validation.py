"""From a decoded JSON body to a request model, or to the one error that says what is wrong.

Errors carry OpenAI's codes and a `param` like `messages[0].role`. The first fault wins: one error
per answer. Messages quote at most a short piece of the input.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from services.frontend.errors import ApiError, invalid
from shared.json_limits import MAX_DEPTH, nests_within

ModelT = TypeVar("ModelT", bound=BaseModel)
Problem = Mapping[str, Any]

MAX_QUOTED: Final = 80

_EXPECTED: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "a string or an array",
}
_BOUNDS: Final = {
    "greater_than": ("below_min_value", ">"),
    "greater_than_equal": ("below_min_value", ">="),
    "less_than": ("above_max_value", "<"),
    "less_than_equal": ("above_max_value", "<="),
}
# The codes that our own validators raise are shown as they are.
_OWN: Final = frozenset({"invalid_type", "invalid_value", "empty_array", "array_above_max_length"})


def parse(model: type[ModelT], body: object) -> ModelT:
    """The body as a request; raises the first fault as an `ApiError`."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    raise explain(problems[0])


def explain(problem: Problem) -> ApiError:
    """One fault found by pydantic as an answer."""
    kind, param = problem["type"], path_of(problem["loc"])
    name = f"'{param}'" if param else "the request body"
    if kind in _EXPECTED:
        return invalid(
            f"Invalid type for {name}: expected {_EXPECTED[kind]}, got "
            f"{_type_name(problem['input'])} instead.",
            param,
            "invalid_type",
        )
    if kind in _BOUNDS:
        return _out_of_bounds(problem, name, param)
    if kind in _OWN:
        return invalid(f"Invalid {name}: {problem['msg']}.", param, kind)
    return _SPECIAL.get(kind, _other)(problem, name, param)


def path_of(loc: Sequence[str | int]) -> str | None:
    """A location as `messages[0].role`; union tags, which stand in brackets, are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part.startswith(("(", "[")) and part.endswith((")", "]"))):
            path += f".{part}" if path else part
    return path or None


def quote(value: object) -> str:
    """A short piece of the input."""
    text = repr(value) if not isinstance(value, str) else repr(value[: MAX_QUOTED + 1])
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


def check_depth(value: object, param: str) -> None:
    """Refuse JSON that nests deeper than `MAX_DEPTH`."""
    if not nests_within(value):
        raise invalid(f"Invalid '{param}': it nests deeper than {MAX_DEPTH} levels.", param)


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a decimal", str: "a string"}
    names |= {list: "an array", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _out_of_bounds(problem: Problem, name: str, param: str | None) -> ApiError:
    suffix, sign = _BOUNDS[problem["type"]]
    bound = next(iter(problem["ctx"].values()))
    number = "decimal" if isinstance(bound, float) else "integer"
    side = "below minimum" if suffix.startswith("below") else "above maximum"
    return invalid(
        f"Invalid {name}: {number} {side} value. Expected a value {sign} {bound}, but got "
        f"{quote(problem['input'])} instead.",
        param,
        f"{number}_{suffix}",
    )


def _missing(_problem: Problem, name: str, param: str | None) -> ApiError:
    return invalid(f"Missing required parameter: {name}.", param, "missing_required_parameter")


def _wrong_choice(problem: Problem, name: str, param: str | None) -> ApiError:
    return invalid(
        f"Invalid value for {name}: {quote(problem['input'])}. Supported values are: "
        f"{problem['ctx']['expected']}.",
        param,
    )


def _too_short(problem: Problem, name: str, param: str | None) -> ApiError:
    least = problem["ctx"]["min_length"]
    return invalid(
        f"Invalid {name}: empty array. Expected at least {least} element(s).", param, "empty_array"
    )


def _too_long(problem: Problem, name: str, param: str | None) -> ApiError:
    most, size = problem["ctx"]["max_length"], problem["ctx"]["actual_length"]
    return invalid(
        f"Invalid {name}: expected at most {most} elements, but got {size or 'more'} instead.",
        param,
        "array_above_max_length",
    )


def _string_length(problem: Problem, name: str, param: str | None) -> ApiError:
    is_long = problem["type"] == "string_too_long"
    word = "above_max_length" if is_long else "below_min_length"
    bound = problem["ctx"]["max_length" if is_long else "min_length"]
    return invalid(
        f"Invalid {name}: expected a string of at {'most' if is_long else 'least'} {bound} "
        f"characters.",
        param,
        f"string_{word}",
    )


def _pattern(problem: Problem, name: str, param: str | None) -> ApiError:
    return invalid(
        f"Invalid {name}: {quote(problem['input'])} does not match the pattern "
        f"{problem['ctx']['pattern']}.",
        param,
    )


def _other(problem: Problem, name: str, param: str | None) -> ApiError:
    return invalid(f"Invalid {name}: {problem['msg']}.", param)


_SPECIAL: Final[Mapping[str, Callable[[Problem, str, str | None], ApiError]]] = {
    "missing": _missing,
    "literal_error": _wrong_choice,
    "too_short": _too_short,
    "too_long": _too_long,
    "string_too_short": _string_length,
    "string_too_long": _string_length,
    "string_pattern_mismatch": _pattern,
}
