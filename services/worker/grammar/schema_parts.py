"""Parts of a JSON Schema that stand for themselves: with what they refer to, and nothing else."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from services.worker.grammar.keywords import LISTS_OF_SCHEMAS, SCHEMAS, SCHEMAS_BY_NAME
from services.worker.grammar.string_values import FORMATS
from shared.json_pointer import resolve_pointer

# What says nothing about values, and what would give references another meaning.
LEFT_OUT: Final = frozenset(
    {"$defs", "definitions", "$id", "$schema", "$anchor", "$comment", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly", "x-guidance"}
)


Rename: TypeAlias = Callable[[Any], Any]


def standing_alone(schema: Any, root: Any) -> dict[str, Any]:  # noqa: ANN401  (any JSON values)
    """A part of `root` as a document of its own: what it refers to, directly or not, is beside it.

    References that lead nowhere stay as they are, for whoever compiles it to complain about.
    """
    names: dict[str, str] = {}

    def rename(pointer: Any) -> Any:  # noqa: ANN401  (any JSON values)
        if resolve_pointer(pointer, root) is None:
            return pointer
        name = names.setdefault(pointer, f"d{len(names)}")
        return f"#/$defs/{name}"

    definitions: dict[str, Any] = {}
    whole = _copied(schema, rename, LEFT_OUT)
    waiting = list(names)
    for pointer in waiting:  # grows while it runs
        part = _copied(resolve_pointer(pointer, root), rename, LEFT_OUT)
        definitions[names[pointer]] = part
        waiting.extend(list(names)[len(waiting) :])
    document: dict[str, Any] = whole if isinstance(whole, dict) else {}
    return {**document, "$defs": definitions} if definitions else document


def with_own_formats(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A whole schema in which formats are the patterns by which we enforce them everywhere."""
    found: dict[str, Any] = _copied(schema, lambda pointer: pointer, frozenset())
    return found


def _copied(node: Any, rename: Rename, left_out: frozenset[str]) -> Any:  # noqa: ANN401  (any JSON values)
    """A schema with references renamed, formats as patterns, and some keywords left out."""
    if not isinstance(node, Mapping):
        return node
    found: dict[str, Any] = {}
    for key, value in node.items():
        if key in left_out:
            continue
        if key == "$ref":
            found[key] = rename(value)
        elif key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _copied(each, rename, left_out) for name, each in value.items()}
        elif key in LISTS_OF_SCHEMAS and isinstance(value, list):
            found[key] = [_copied(each, rename, left_out) for each in value]
        elif key in SCHEMAS:
            found[key] = _copied(value, rename, left_out)
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
