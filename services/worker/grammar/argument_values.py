"""The value of one argument as a part of a grammar.

A text is written raw, every other value as JSON, and whoever reads the call tells them apart by the
declared types (`shared.argument_types`). So a text that would be read as another type is not
possible, and what is written always comes back as a value of its schema.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher

from services.worker.grammar.arguments import Argument
from services.worker.grammar.schema_parts import LEFT_OUT, standing_alone
from services.worker.grammar.string_forms import (
    Forms,
    StringForm,
    StringReader,
    is_read_as_other,
    read_as_other,
)
from services.worker.grammar.writer import ANY_TEXT, GrammarWriter, quoted, refused
from shared.argument_types import declared_types, named_types, type_of
from shared.errors import RequestError
from shared.json_pointer import resolve_pointer

# No layout: a value is one line of JSON, as the template writes it.
_SEPARATORS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Within what a double holds; readers take a larger number for a text.
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?/"
_MAX_DEPTH: Final = 32
_COMBINED: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "enum", "const"})


class ValueWriter:
    """Writes the values of one tool's arguments."""

    def __init__(self, writer: GrammarWriter, root: Any, *, is_strict: bool) -> None:  # noqa: ANN401  (any JSON value)
        """`root` is the schema of all arguments."""
        self._writer = writer
        self._root = root
        self._is_strict = is_strict

    def add(self, argument: Argument) -> str | None:
        """The rule of its value; None where it has none and need not be there.

        Raises:
            RequestError: It has none and is required, or is described by what cannot be enforced.
        """
        parts: list[str] = []
        if not argument.types or "string" in argument.types:
            forms = self._forms(argument)
            parts.extend(part for form in forms if (part := self._text(form, argument)))
        others = [name for name in argument.types if name != "string"]
        for leaf in self._leaves(argument.schema, 0) if others else ():
            parts.extend(self._json(leaf, others, argument.where))
        if not parts and not self._is_strict and argument.schema is not False:
            parts = [self._writer.terminal(ANY_TEXT)]  # what nobody understands is read as a text
        if parts:
            return self._writer.rule(" | ".join(dict.fromkeys(parts)))
        if argument.is_required:
            raise refused(argument.where, "no value of it can be written")
        return None

    # ---- texts ----

    def _forms(self, argument: Argument) -> Forms:
        reader = StringReader(self._root, argument.where, is_strict=self._is_strict)
        try:
            return reader.read(argument.schema)
        except RequestError:
            if self._is_strict:
                raise
            return [StringForm()]

    def _text(self, form: StringForm, argument: Argument) -> str:
        """The part that reads a form; empty where nothing is left of it."""
        others = read_as_other(argument.types)
        if form.literals is not None and not form.terminals:
            literals = [t for t in form.literals if not is_read_as_other(t, argument.types)]
            return self._writer.rule(" | ".join(map(quoted, literals))) if literals else ""
        parts = list(form.terminals) or [ANY_TEXT]
        if form.literals is not None:
            parts.insert(0, f"({' | '.join(map(quoted, form.literals))})")
        if others:
            parts.append(f"~/{others}/")
        return self._writer.terminal(" & ".join(parts))

    # ---- other values ----

    def _leaves(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401  (any JSON value)
        """The alternatives that a schema is, where it is nothing but alternatives."""
        if not isinstance(schema, Mapping):
            return
        keys = schema.keys() - LEFT_OUT
        branches: list[Any] = []
        if keys == {"$ref"}:
            branches = [resolve_pointer(schema["$ref"], self._root)]
        elif keys in ({"anyOf"}, {"oneOf"}):
            (name,) = keys
            branches = schema[name] if isinstance(schema[name], list) else []
        if not branches or depth > _MAX_DEPTH:
            yield schema
        for branch in branches if depth <= _MAX_DEPTH else ():
            yield from self._leaves(branch, depth + 1)

    def _json(self, leaf: Mapping[str, Any], others: Sequence[str], where: str) -> list[str]:
        """The parts that read what is no text of one alternative."""
        keys = leaf.keys() - LEFT_OUT
        types = [name for name in declared_types(leaf, self._root) if name in others]
        if keys <= {"type", "enum", "const"} and keys & {"enum", "const"}:
            return self._literals(leaf)
        if not types:
            return []
        parts = []
        if keys == {"type"} and "number" in types:
            parts.append(self._writer.terminal(_NUMBER))
            types = [name for name in types if name not in ("number", "integer")]
        if types:
            parts.extend(self._schema(leaf, types, where))
        return parts

    def _literals(self, leaf: Mapping[str, Any]) -> list[str]:
        listed = [leaf["const"]] if "const" in leaf else leaf["enum"]
        values = [value for value in listed if not isinstance(value, str) and _fits(value, leaf)]
        texts = dict.fromkeys(json.dumps(value, ensure_ascii=False) for value in values)
        return [self._writer.rule(" | ".join(map(quoted, texts)))] if texts else []

    def _schema(self, leaf: Mapping[str, Any], types: list[str], where: str) -> list[str]:
        """JSON of the schema, of these types alone."""
        only = {**leaf, "type": types} if "type" in leaf else {"allOf": [leaf, {"type": types}]}
        document = standing_alone(only, self._root, where)
        options = {"lenient": not self._is_strict, **_SEPARATORS}
        document["x-guidance"] = options
        if "type" not in leaf or leaf.keys() & _COMBINED:
            # Types are gathered without looking at what else is said: nothing may be left of one.
            told = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(document))
            if "Unsatisfiable" in told:
                return []
        return [self._writer.schema(document)]


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:  # noqa: ANN401  (any JSON value)
    """Whether a listed value is of the declared types and of the list, if there are both."""
    if "const" in schema and isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return False
    if "type" not in schema:
        return True
    names, own = named_types(schema), type_of(value)
    is_whole = own == "number" and float(value).is_integer()
    return (
        own in names
        or (own == "integer" and "number" in names)
        or (is_whole and "integer" in names)
    )
