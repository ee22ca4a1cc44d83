"""What a tool's schema says about its arguments, as far as a grammar of calls needs it.

A value is raw text where a string is among its types, JSON elsewhere: the rule by which calls are
read back (docs/output-machine.md).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.worker.grammar.writer import refused
from shared.constraint import CalledTool
from shared.json_pointer import resolve_pointer

_DEFINITIONS: Final = ("$defs", "definitions")
_COMBINED: Final = ("anyOf", "oneOf", "allOf")
_TYPES: Final = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One declared argument."""

    name: str
    schema: Any
    is_required: bool
    is_text: bool
    """Whether it is written as raw text."""
    literals: tuple[Any, ...]
    """The only values it can have, if they are listed."""
    facets: Mapping[str, Any]
    """Keywords about the text, if it is one."""
    where: str
    """The tool and the argument, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a tool."""

    declared: tuple[Argument, ...] = ()
    takes_any: bool = False
    """Whether it takes arguments without declaring any."""
    definitions: Mapping[str, Any] = field(default_factory=dict)
    """What references inside the schemas of values point to."""


def read_arguments(tool: CalledTool) -> Arguments:
    """The arguments in the order of their schema.

    Raises:
        RequestError: The schema is none, or a strict one that no grammar of calls can follow.
    """
    where = f"calls: tool {tool.name}"
    if not tool.parameters_json:
        return Arguments()  # as in OpenAI's API: a function without parameters takes none
    try:
        root = json.loads(tool.parameters_json)
    except (ValueError, RecursionError) as error:
        raise refused(where, f"the parameters are not JSON: {error}") from None
    if not isinstance(root, dict):
        raise refused(where, "the parameters must be a JSON Schema of an object")
    properties, required = _merged(root, tool, where)
    declared = tuple(
        _argument(name, schema, name in required, root, f"{where}, argument {name}")
        for name, schema in properties.items()
    )
    is_closed = tool.is_strict or root.get("additionalProperties") is False
    return Arguments(
        declared=declared,
        takes_any=not declared and not is_closed,
        definitions={name: root[name] for name in _DEFINITIONS if name in root},
    )


def _merged(
    root: Mapping[str, Any], tool: CalledTool, where: str
) -> tuple[dict[str, Any], frozenset[str]]:
    """Properties and required names, also behind `$ref` and `allOf`."""
    properties: dict[str, Any] = {}
    required: set[str] = set()
    for node, is_certain in _objects(root, root):
        if not is_certain and tool.is_strict:
            raise refused(where, "strict parameters have no anyOf or oneOf at their top")
        given = node.get("properties", {})
        if not isinstance(given, dict):
            raise refused(where, "properties must be an object")
        for name, schema in given.items():
            if not isinstance(schema, dict | bool):
                raise refused(where, f"the schema of argument {name} must be an object")
            properties.setdefault(name, schema)
        if is_certain and isinstance(node.get("required"), list):
            required.update(str(name) for name in node["required"])
    if tool.is_strict and required - properties.keys():
        missing = sorted(required - properties.keys())[0]
        raise refused(where, f"argument {missing} is required and not declared")
    return properties, frozenset(required)


def _objects(node: Any, root: Any) -> Iterator[tuple[Mapping[str, Any], bool]]:  # noqa: ANN401  (any JSON value)
    """The schemas that make up one, and whether every object must follow them; each once."""
    pending, seen = [(node, True)], set[int]()
    for each, is_certain in pending:  # grows while it runs
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each, is_certain
        if "$ref" in each:
            pending.append((resolve_pointer(each["$ref"], root), is_certain))
        for name in _COMBINED:
            branches = each.get(name)
            for branch in branches if isinstance(branches, list) else []:
                pending.append((branch, is_certain and name == "allOf"))


def _argument(
    name: str,
    schema: Any,  # noqa: ANN401  (any JSON value)
    is_required: bool,
    root: Mapping[str, Any],
    where: str,
) -> Argument:
    nodes = [node for node, _ in _objects(schema, root)]
    literals = _literals(nodes)
    types = {found for node in nodes for found in _types(node)}
    is_combined = any("anyOf" in node or "oneOf" in node for node in nodes)
    return Argument(
        name=name,
        schema=schema,
        is_required=is_required,
        is_text=not types or "string" in types,
        literals=() if is_combined else literals,
        # Several branches may be texts of different kinds: then any text will do.
        facets={} if is_combined or types - {"string"} else _facets(nodes),
        where=where,
    )


def _literals(nodes: list[Mapping[str, Any]]) -> tuple[Any, ...]:
    for node in nodes:
        if "const" in node:
            return (node["const"],)
        listed = node.get("enum")
        if isinstance(listed, list) and listed:
            return tuple(listed)
    return ()


def _types(node: Mapping[str, Any]) -> set[str]:
    if "type" in node:
        named = node["type"] if isinstance(node["type"], list) else [node["type"]]
        # Names that nobody knows are read back as text.
        return {name if name in _TYPES else "string" for name in map(str, named)}
    if "properties" in node or "additionalProperties" in node:
        return {"object"}
    return {"array"} if "items" in node or "prefixItems" in node else set()


def _facets(nodes: list[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("pattern", "format", "minLength", "maxLength")
    return {name: node[name] for node in nodes for name in names if name in node}
