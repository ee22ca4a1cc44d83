"""What a tool's JSON Schema says about the types of its arguments.

Tool calls are written as text, so whoever reads them and whoever constrains their writing have to
agree which values are raw text. An unusual schema never fails: what nobody can read declares
nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from shared.json_pointer import resolve_pointer

# In the order in which readers try them.
ORDER: Final = ("null", "integer", "number", "boolean", "object", "array", "string")
_NAMES: Final = {
    **{name: name for name in ORDER},
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "str": "string",
    "text": "string",
    "none": "null",
}

Types = tuple[str, ...]


def declared_properties(schema: Any) -> dict[str, Any]:  # noqa: ANN401  (any JSON value)
    """The properties of an arguments object, also behind $ref, allOf, anyOf and oneOf."""
    found: dict[str, Any] = {}
    for node in _reachable(schema, schema, lambda _: False):
        properties = node.get("properties")
        if isinstance(properties, Mapping):
            for key, value in properties.items():
                found.setdefault(str(key), value)
    return found


def declared_types(schema: Any, root: Any) -> Types:  # noqa: ANN401  (any JSON values)
    """Types that a schema allows, in the order to try; empty when it says nothing.

    Args:
        schema: Of one argument.
        root: The schema of all arguments, to which references point.
    """
    found: set[str] = set()
    implied: set[str] = set()
    for node in _reachable(schema, root, _is_decided):
        if "type" in node:
            found |= named_types(node)
        elif isinstance(node.get("enum"), list):
            found |= {type_of(value) for value in node["enum"]}
        elif "const" in node:
            found.add(type_of(node["const"]))
        else:
            implied |= _implied(node)
    return tuple(name for name in ORDER if name in (found or implied))


def named_types(schema: Mapping[str, Any]) -> set[str]:
    """What stands under `type`; a name that nobody knows is a string."""
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {_NAMES.get(str(name).lower(), "string") for name in named}


def type_of(value: Any) -> str:  # noqa: ANN401  (any JSON value)
    """The type of a decoded JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _is_decided(node: Mapping[str, Any]) -> bool:
    return "type" in node or isinstance(node.get("enum"), list) or "const" in node


def _reachable(
    schema: Any,  # noqa: ANN401  (any JSON value)
    root: Any,  # noqa: ANN401  (any JSON value)
    is_leaf: Callable[[Mapping[str, Any]], bool],
) -> Iterator[Mapping[str, Any]]:
    """A schema and those it is made of by $ref, anyOf, oneOf and allOf; each once."""
    pending, seen = [schema], set[int]()
    for node in pending:  # grows while it runs
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if is_leaf(node):
            continue
        if "$ref" in node:
            pending.append(resolve_pointer(node["$ref"], root))
        for name in ("anyOf", "oneOf", "allOf"):
            branches = node.get(name)
            pending.extend(branches if isinstance(branches, list) else [])


def _implied(schema: Mapping[str, Any]) -> set[str]:
    if "properties" in schema or "additionalProperties" in schema:
        return {"object"}
    return {"array"} if "items" in schema or "prefixItems" in schema else set()
