"""Parts of a JSON Schema that stand for themselves: with what they refer to, and nothing else."""

from collections.abc import Mapping
from typing import Any, Final

from services.worker.grammar.string_values import FORMATS
from shared.json_pointer import resolve_pointer

_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "dependentSchemas")
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS: Final = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
# What says nothing about values, and what would give references another meaning.
LEFT_OUT: Final = frozenset(
    {"$defs", "definitions", "$id", "$schema", "$anchor", "$comment", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly", "x-guidance"}
)


def standing_alone(schema: Any, root: Any) -> dict[str, Any]:  # noqa: ANN401  (any JSON values)
    """A part of `root` as a document of its own: what it refers to, directly or not, is beside it.

    References that lead nowhere stay as they are, for whoever compiles it to complain about.
    """
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    whole = _copied(schema, root, names)
    waiting = list(names)
    for pointer in waiting:  # grows while it runs
        definitions[names[pointer]] = _copied(resolve_pointer(pointer, root), root, names)
        waiting.extend(list(names)[len(waiting) :])
    document: dict[str, Any] = whole if isinstance(whole, dict) else {}
    return {**document, "$defs": definitions} if definitions else document


def _copied(node: Any, root: Any, names: dict[str, str]) -> Any:  # noqa: ANN401  (any JSON values)
    """A schema without its decoration; references get names of their own."""
    if not isinstance(node, Mapping):
        return node
    found: dict[str, Any] = {}
    for key, value in node.items():
        if key in LEFT_OUT:
            continue
        if key == "$ref":
            found[key] = _renamed(value, root, names)
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _copied(each, root, names) for name, each in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            found[key] = [_copied(each, root, names) for each in value]
        elif key in _SCHEMAS:
            found[key] = _copied(value, root, names)
        else:
            found[key] = value
    return _with_own_format(found)


def _with_own_format(schema: dict[str, Any]) -> dict[str, Any]:
    """A format as the pattern by which it is enforced in texts as well."""
    expression = FORMATS.get(str(schema.get("format")))
    if expression is None:
        return schema
    pattern = f"^({expression})$"
    others = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in others:
        return {**others, "pattern": pattern}
    return {**others, "allOf": [*others.get("allOf", ()), {"pattern": pattern}]}


def _renamed(pointer: Any, root: Any, names: dict[str, str]) -> Any:  # noqa: ANN401  (any JSON values)
    if resolve_pointer(pointer, root) is None:
        return pointer
    name = names.setdefault(pointer, f"d{len(names)}")
    return f"#/$defs/{name}"
