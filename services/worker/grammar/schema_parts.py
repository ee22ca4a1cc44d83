"""Parts of a JSON Schema that stand for themselves: with what they refer to, and nothing else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from services.worker.grammar.exact_numbers import exact_numbers
from services.worker.grammar.keywords import LISTS_OF_SCHEMAS, SCHEMAS, SCHEMAS_BY_NAME
from services.worker.grammar.string_values import FORMATS
from shared.json_pointer import resolve_pointer

# What says nothing about values, and what would give references another meaning.
LEFT_OUT: Final = frozenset(
    {"$defs", "definitions", "$id", "$schema", "$anchor", "$comment", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly", "x-guidance"}
)


Rename: TypeAlias = Callable[[Any], Any]


def standing_alone(schema: Any, root: Any, where: str) -> dict[str, Any]:  # noqa: ANN401  (any JSON values)
    """A part of `root` as a document of its own: what it refers to, directly or not, is beside it.

    References that lead nowhere stay as they are, for whoever compiles it to complain about.

    Raises:
        RequestError: It has numbers that the engine cannot keep; `where` says whose.
    """
    names: dict[str, str] = {}

    def rename(pointer: Any) -> Any:  # noqa: ANN401  (any JSON values)
        if resolve_pointer(pointer, root) is None:
            return pointer
        name = names.setdefault(pointer, f"d{len(names)}")
        return f"#/$defs/{name}"

    definitions: dict[str, Any] = {}
    copy = _Copy(rename=rename, left_out=LEFT_OUT, where=where)
    whole = copy.of(schema)
    waiting = list(names)
    for pointer in waiting:  # grows while it runs
        part = copy.of(resolve_pointer(pointer, root))
        definitions[names[pointer]] = part
        waiting.extend(list(names)[len(waiting) :])
    document: dict[str, Any] = whole if isinstance(whole, dict) else {}
    return {**document, "$defs": definitions} if definitions else document


def as_enforced(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A whole schema as the engine is to enforce it: formats as our patterns, numbers exact.

    Raises:
        RequestError: It has numbers that the engine cannot keep; `where` says whose.
    """
    copy = _Copy(rename=lambda pointer: pointer, left_out=frozenset(), where=where)
    found: dict[str, Any] = copy.of(schema)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """Copies schemas with references renamed, and some keywords rewritten or left out."""

    rename: Rename
    left_out: frozenset[str]
    where: str

    def of(self, node: Any) -> Any:  # noqa: ANN401  (any JSON values)
        """A schema and all that it holds."""
        if not isinstance(node, Mapping):
            return node
        found: dict[str, Any] = {}
        for key, value in node.items():
            if key in self.left_out:
                continue
            if key == "$ref":
                found[key] = self.rename(value)
            elif key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
                found[key] = {name: self.of(each) for name, each in value.items()}
            elif key in LISTS_OF_SCHEMAS and isinstance(value, list):
                found[key] = [self.of(each) for each in value]
            elif key in SCHEMAS:
                found[key] = self.of(value)
            else:
                found[key] = value
        return exact_numbers(_with_own_format(found), self.where)


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
