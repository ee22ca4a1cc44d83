"""Which texts a schema allows, as alternatives of what each has to match.

A schema of a string that is made of references, `allOf`, `anyOf`, `enum`, patterns and bounds is
multiplied out: a list of alternatives, each a list of conditions that all hold.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from services.worker.grammar.string_values import FACETS, facet_terminals
from services.worker.grammar.writer import refused
from shared.argument_types import named_types
from shared.json_pointer import resolve_pointer

_MAX_DEPTH: Final = 32
_MAX_ALTERNATIVES: Final = 256
_NOT_ENFORCED: Final = ("not", "if", "contentEncoding", "contentMediaType", "$dynamicRef")


@dataclass(frozen=True, slots=True, kw_only=True)
class StringForm:
    """One alternative: a text is among the literals, if they are listed, and fits all terminals."""

    literals: tuple[str, ...] | None = None
    terminals: tuple[str, ...] = ()

    def both(self, other: "StringForm") -> "StringForm | None":
        """What follows both; None if nothing can."""
        literals = self.literals if other.literals is None else other.literals
        if self.literals is not None and other.literals is not None:
            literals = tuple(text for text in self.literals if text in other.literals)
        if literals == ():
            return None
        terminals = tuple(dict.fromkeys((*self.terminals, *other.terminals)))
        return StringForm(literals=literals, terminals=terminals)


Forms: TypeAlias = list[StringForm]


class StringReader:
    """Reads the string side of the schemas of one tool."""

    def __init__(self, root: Any, where: str, *, is_strict: bool) -> None:  # noqa: ANN401  (any JSON value)
        """`root` is what references point into; a lax reader leaves patterns and bounds out."""
        self._root = root
        self._where = where
        self._is_strict = is_strict

    def read(self, schema: Any) -> Forms:  # noqa: ANN401  (any JSON value)
        """The alternatives; none where no text is allowed.

        Raises:
            RequestError: A strict schema says what no expression can say.
        """
        return list(dict.fromkeys(self._read(schema, ())))

    def _read(self, schema: Any, path: tuple[int, ...]) -> Forms:  # noqa: ANN401  (any JSON value)
        if schema is True:
            return [StringForm()]
        # What leads back to itself allows nothing beyond its other alternatives.
        if not isinstance(schema, Mapping) or id(schema) in path:
            return []
        if len(path) > _MAX_DEPTH:
            raise refused(self._where, "it nests too deep")
        if "type" in schema and "string" not in named_types(schema):
            return []
        forms = self._own(schema)
        for options in self._parts(schema, (*path, id(schema))):
            forms = [
                both for one in forms for other in options if (both := one.both(other)) is not None
            ]
            if len(forms) > _MAX_ALTERNATIVES:
                raise refused(self._where, "it has too many alternatives")
        return forms

    def _own(self, schema: Mapping[str, Any]) -> Forms:
        """What the keywords of this schema alone say."""
        if self._is_strict:
            for name in _NOT_ENFORCED:
                if name in schema:
                    raise refused(self._where, f"{name} of a text cannot be enforced")
        form = StringForm()
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            texts = tuple(dict.fromkeys(value for value in listed if isinstance(value, str)))
            if not texts:
                return []
            form = replace(form, literals=texts)
        if self._is_strict and any(name in schema for name in FACETS):
            form = replace(form, terminals=tuple(facet_terminals(schema, self._where)))
        return [form]

    def _parts(self, schema: Mapping[str, Any], path: tuple[int, ...]) -> Sequence[Forms]:
        """What its sub-schemas say: all of these hold."""
        found = []
        if "$ref" in schema:
            found.append(self._read(resolve_pointer(schema["$ref"], self._root), path))
        if isinstance(schema.get("allOf"), list):
            found.extend(self._read(each, path) for each in schema["allOf"])
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                found.append([form for each in schema[name] for form in self._read(each, path)])
        return found


# How a reader tells a text from values of other types, blanks around it aside.
_READ_AS: Final[Mapping[str, str]] = {
    "null": "(?i:null)",
    "integer": "-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "boolean": "(?i:true|false|0|1)",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
_BLANKS: Final = r"[\s\x1c-\x1f]*"


def read_as_other(types: Sequence[str]) -> str:
    """An expression of the texts that are read as another of an argument's types than a string."""
    found = "|".join(_READ_AS[name] for name in types if name in _READ_AS)
    return f"{_BLANKS}({found}){_BLANKS}" if found else ""


def is_read_as_other(text: str, types: Sequence[str]) -> bool:
    """Whether a reader takes a text for something else."""
    expression = read_as_other(types)
    return bool(expression) and re.fullmatch(expression, text) is not None
