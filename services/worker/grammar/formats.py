"""A text format as a part of a grammar."""

import json
from typing import Any, Final

from llguidance.gbnf_to_lark import any_to_lark

from services.worker.grammar.keywords import check_keywords
from services.worker.grammar.schema_parts import as_enforced
from services.worker.grammar.structural_tags import add_structural_tag
from services.worker.grammar.writer import GrammarWriter, quoted, refused
from shared.constraint import MAX_CHOICES, FormatKind, TextFormat

FIELD: Final = "format"
# What pretty-printers write between the parts of JSON: a blank, or a line break and indentation for
# ten levels of four. A model that has lost its way writes blanks without end where they may stand.
_WHITESPACE: Final = r" |\r?\n[ \t]{0,40}"


def is_json(given: TextFormat | None) -> bool:
    """Whether such a text is JSON."""
    return given is not None and given.kind in (FormatKind.JSON_OBJECT, FormatKind.JSON_SCHEMA)


def add_format(writer: GrammarWriter, given: TextFormat) -> str:
    """The part of a grammar that reads such a text.

    Raises:
        RequestError: The description is none, and why.
    """
    match given.kind:
        case FormatKind.JSON_OBJECT:
            return writer.schema(with_options({"type": "object"}, given))
        case FormatKind.JSON_SCHEMA:
            return writer.schema(with_options(read_schema(given.text, FIELD), given))
        case FormatKind.REGEX:
            return writer.regex(given.text)
        case FormatKind.CHOICE:
            return _add_choice(writer, given.choices)
        case FormatKind.GRAMMAR:
            return writer.grammar(_read_grammar(given.text))
        case FormatKind.STRUCTURAL_TAG:
            return add_structural_tag(
                writer,
                given.text,
                lambda schema, where: with_options(
                    checked_schema(schema, f"{FIELD}: {where}"), given
                ),
            )


def read_schema(text: str, field: str) -> dict[str, Any]:
    """A JSON Schema; `true` is any value."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(field, f"the schema is not JSON: {error}") from None
    return checked_schema(schema, field)


def checked_schema(schema: Any, field: str) -> dict[str, Any]:  # noqa: ANN401  (any JSON value)
    """A decoded JSON Schema; `true` is any value."""
    if schema is True:
        return {}
    if schema is False:
        raise refused(field, "the schema false allows no value")
    if not isinstance(schema, dict):
        raise refused(field, "a schema is a JSON object")
    check_keywords(schema, field)
    return schema


def with_options(schema: dict[str, Any], given: TextFormat) -> dict[str, Any]:
    """A schema with what the engine is to do beyond it."""
    options: dict[str, Any] = {"lenient": not given.is_strict}
    if given.has_whitespace:
        options["whitespace_pattern"] = given.whitespace_pattern or _WHITESPACE
    else:
        options["whitespace_flexible"] = False
    return {**as_enforced(schema, FIELD), "x-guidance": options}


def _add_choice(writer: GrammarWriter, choices: tuple[str, ...]) -> str:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise refused(FIELD, f"{len(choices)} choices, 1 to {MAX_CHOICES} are allowed")
    if "" in choices:
        raise refused(FIELD, "a choice is empty")
    return writer.rule(" | ".join(map(quoted, dict.fromkeys(choices))))


def _read_grammar(text: str) -> str:
    try:
        return any_to_lark(text)
    except RecursionError:
        raise refused(FIELD, "the grammar nests too deep") from None
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        raise refused(FIELD, f"the grammar cannot be read: {error}") from None
