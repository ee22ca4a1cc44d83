"""Whether the keywords of a JSON Schema have values that they can have.

The engine looks at what it comes by, and the readers of tool arguments take what they know: without
this a schema that is wrong would be refused in one place and mean nothing in another.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from services.worker.grammar.writer import refused
from shared.json_pointer import resolve_pointer

SCHEMAS_BY_NAME: Final = (
    *("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"),
)
LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SCHEMAS: Final = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_COUNTS: Final = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_MAX_SHOWN: Final = 60


def check_keywords(schema: Any, field: str) -> None:  # noqa: ANN401  (any JSON value)
    """Walk through a schema and all that it holds.

    Raises:
        RequestError: A keyword has a value that it cannot have; names both and the place.
    """
    pending: list[tuple[str, Any]] = [("", schema)]
    followed = set[str]()
    for place, node in pending:  # grows while it runs
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise refused(
                field, f"{place or 'the schema'} must be a schema: an object or a boolean"
            )
        for key, value in node.items():
            where = f"{place}.{key}"[-_MAX_SHOWN:] if place else key[:_MAX_SHOWN]
            expected = _expected(key, value)
            if expected:
                raise refused(field, f"{where} must be {expected}, not {_shown(value)}")
            pending.extend(_inside(where, key, value))
            if key == "$ref" and value not in followed:
                followed.add(value)
                pending.append((value[:_MAX_SHOWN], _target(value, schema)))


def _target(pointer: str, root: Any) -> Any:  # noqa: ANN401  (any JSON values)
    """What a reference names; one that leads nowhere is for whoever compiles it to refuse."""
    found = resolve_pointer(pointer, root)
    return True if found is None else found


def _expected(key: str, value: Any) -> str:  # noqa: ANN401  (any JSON value)
    """What a keyword must be; empty where it is."""
    rule = _RULES.get(key)
    return "" if rule is None or rule[0](value) else rule[1]


def _inside(where: str, key: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401  (any JSON value)
    """The schemas that are the value of a keyword."""
    if key in SCHEMAS_BY_NAME:
        yield from ((f"{where}.{name}", each) for name, each in value.items())
    elif key in LISTS_OF_SCHEMAS and isinstance(value, list):
        yield from ((f"{where}[{place}]", each) for place, each in enumerate(value))
    elif key in SCHEMAS:
        yield where, value


def _is_number(value: Any) -> bool:  # noqa: ANN401  (any JSON value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))


def _is_count(value: Any) -> bool:  # noqa: ANN401  (any JSON value)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_filled_list(value: Any) -> bool:  # noqa: ANN401  (any JSON value)
    return isinstance(value, list) and bool(value)


def _is_list_of_texts(value: Any) -> bool:  # noqa: ANN401  (any JSON value)
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:  # noqa: ANN401  (any JSON value)
    return isinstance(value, str) or (_is_filled_list(value) and _is_list_of_texts(value))


def _shown(value: Any) -> str:  # noqa: ANN401  (any JSON value)
    """A value in an error; a long one is cut."""
    if isinstance(value, Mapping | list) and value:
        return "an object" if isinstance(value, Mapping) else "an array of others"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


_Rule: TypeAlias = tuple[Callable[[Any], bool], str]
_OBJECT: Final[_Rule] = (lambda value: isinstance(value, Mapping), "an object")
_BRANCHES: Final[_Rule] = (_is_filled_list, "an array that is not empty")
_NUMBER: Final[_Rule] = (_is_number, "a number")
# Draft 4 says by a boolean that `minimum` itself is left out.
_NUMBER_OR_FLAG: Final[_Rule] = (
    lambda value: isinstance(value, bool) or _is_number(value),
    "a number",
)
_TEXT: Final[_Rule] = (lambda value: isinstance(value, str), "a text")
_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(SCHEMAS_BY_NAME, _OBJECT),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum"), _BRANCHES),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _NUMBER_OR_FLAG),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(_COUNTS, (_is_count, "an integer of 0 or more")),
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    "prefixItems": (lambda value: isinstance(value, list), "an array"),
    "required": (_is_list_of_texts, "an array of texts"),
    "type": (_is_type, "a text or an array of texts"),
}
