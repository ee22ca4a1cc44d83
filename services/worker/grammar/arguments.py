"""What a tool's schema says about its arguments, as far as a grammar of calls needs it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.worker.grammar.keywords import check_keywords
from services.worker.grammar.writer import refused
from shared.argument_types import Types, declared_properties, declared_types
from shared.constraint import CalledTool
from shared.json_pointer import resolve_pointer

_COMBINED: Final = ("anyOf", "oneOf", "allOf")
# What the arguments as a whole would have to follow, and a grammar of single ones does not.
_NOT_ENFORCED: Final = (
    "not",
    "if",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "patternProperties",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One declared argument."""

    name: str
    schema: Any
    is_required: bool
    types: Types
    """As whoever reads the call understands its text; empty and `string` are raw text."""
    where: str
    """The tool and the argument, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a tool."""

    declared: tuple[Argument, ...] = ()
    takes_any: bool = False
    """Whether it takes texts without declaring any."""
    root: Any = True
    """What references inside the schemas of values point into."""


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
    check_keywords(root, where)
    properties, required = _merged(root, tool, where)
    as_read = declared_properties(root)
    declared = tuple(
        Argument(
            name=name,
            schema=schema,
            is_required=name in required,
            types=declared_types(as_read[name], root),
            where=f"{where}, argument {name}",
        )
        for name, schema in properties.items()
        if _can_be_written(name, tool, where)
    )
    return Arguments(
        declared=declared,
        takes_any=not properties and not tool.is_strict and _takes_texts(root),
        root=root,
    )


def _merged(
    root: Mapping[str, Any], tool: CalledTool, where: str
) -> tuple[dict[str, Any], frozenset[str]]:
    """Properties and required names, also behind `$ref` and `allOf`."""
    properties: dict[str, Any] = {}
    required: set[str] = set()
    for node, is_certain in _objects(root):
        if tool.is_strict:
            _check_strict(node, is_certain=is_certain, where=where)
        for name, schema in node.get("properties", {}).items():
            if name in properties and is_certain:
                properties[name] = {"allOf": [properties[name], schema]}
            properties.setdefault(name, schema)
        if is_certain:
            required.update(node.get("required", ()))
    if tool.is_strict and required - properties.keys():
        missing = sorted(required - properties.keys())[0]
        raise refused(where, f"argument {missing} is required and not declared")
    return properties, frozenset(required)


def _check_strict(node: Mapping[str, Any], *, is_certain: bool, where: str) -> None:
    if not is_certain:
        raise refused(where, "strict parameters have no anyOf or oneOf at their top")
    for name in _NOT_ENFORCED:
        if name in node:
            raise refused(where, f"{name} of strict parameters cannot be enforced")


def _can_be_written(name: str, tool: CalledTool, where: str) -> bool:
    """Whether a name is read back as it is: readers trim it, and an empty one is none."""
    if name and name == name.strip():
        return True
    if tool.is_strict:
        raise refused(where, f"the name of argument {name!r} is empty or has blanks around it")
    return False


def _takes_texts(root: Mapping[str, Any]) -> bool:
    """Whether arguments that are not declared may be texts, which is how they are read back."""
    others = root.get("additionalProperties", True)
    if isinstance(others, dict):
        return "string" in (declared_types(others, root) or ("string",))
    return others is not False


def _objects(root: Any) -> Iterator[tuple[Mapping[str, Any], bool]]:  # noqa: ANN401  (any JSON value)
    """The schemas that make up one, and whether every object must follow them; each once."""
    pending, seen = [(root, True)], set[int]()
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
