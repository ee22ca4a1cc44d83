"""Structural tags: text with tagged parts, in both notations that vLLM takes.

`{"type": "structural_tag", "format": {...}}` nests parts; the older one lists `structures` with
their `triggers`. Spellings of control tokens in tags and triggers are those tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from services.worker.grammar.writer import ANY_TEXT, GrammarWriter, quoted, refused

_FIELD: Final = "format"
_MAX_DEPTH: Final = 32
_SEVERAL: Final = ("tags", "at_least_one", "stop_after_first")
# What each part may say beside its type.
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "any_text": ("excludes",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "excludes", *_SEVERAL),
    "tags_with_separator": ("separator", *_SEVERAL),
}

Node: TypeAlias = Mapping[str, Any]
ReadSchema: TypeAlias = Callable[[Any, str], dict[str, Any]]


def add_structural_tag(writer: GrammarWriter, text: str, read_schema: ReadSchema) -> str:
    """The part of a grammar that a structural tag describes.

    Args:
        writer: Of the grammar.
        text: The tag.
        read_schema: Makes what the engine is given of a schema at a place, or refuses it.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(_FIELD, f"the structural tag is not JSON: {error}") from None
    if not isinstance(tag, dict):
        raise refused(_FIELD, "a structural tag is a JSON object")
    reader = _TagReader(writer, read_schema)
    if "format" in tag:
        return reader.node(tag["format"], "structural_tag.format", 0)
    return reader.node(_from_older(tag), "structural_tag", 0)


def _from_older(tag: Node) -> Node:
    """The nested form of structures and triggers."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise refused(_FIELD, "a structural tag has 'format', or 'structures' and 'triggers'")
    tags = []
    for place, structure in enumerate(structures):
        where = f"structural_tag.structures[{place}]"
        if not isinstance(structure, dict):
            raise refused(_FIELD, f"{where} must be an object")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append(
            {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}
        )
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _TagReader:
    """Turns nodes into parts of a grammar."""

    def __init__(self, writer: GrammarWriter, read_schema: ReadSchema) -> None:
        self._writer = writer
        self._read_schema = read_schema
        self._parts: Mapping[str, Callable[[Node, str, int], str]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "any_text": self._any_text,
            "regex": self._regex,
            "grammar": self._grammar,
            "sequence": self._sequence,
            "or": self._either,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def node(self, given: object, where: str, depth: int) -> str:
        """One node and all below it."""
        if depth > _MAX_DEPTH:
            raise refused(_FIELD, f"{where} nests deeper than {_MAX_DEPTH} levels")
        if not isinstance(given, dict):
            raise refused(_FIELD, f"{where} must be an object")
        kind = given.get("type")
        read = self._parts.get(kind) if isinstance(kind, str) else None
        if read is None:
            known = ", ".join(self._parts)
            raise refused(_FIELD, f"{where}.type {kind!r} is not one of {known}")
        _check_keys(given, str(kind), where)
        return read(given, where, depth)

    def _const(self, given: Node, where: str, _depth: int) -> str:
        return self._writer.rule(self._writer.literal(_text(given, "value", where)))

    def _schema(self, given: Node, where: str, _depth: int) -> str:
        schema = self._read_schema(given.get("json_schema"), f"{where}.json_schema")
        return self._writer.schema(schema)

    def _any_text(self, given: Node, where: str, _depth: int) -> str:
        return self._writer.terminal(self._text_without(_excludes(given, where)))

    def _text_without(self, parts: Sequence[str]) -> str:
        """A terminal of any text in which none of some texts stands; control tokens never do."""
        ordinary = [part for part in parts if self._writer.literal(part) == quoted(part)]
        if not ordinary:
            return ANY_TEXT
        listed = " | ".join(map(quoted, ordinary))
        return f"{ANY_TEXT} & ~({ANY_TEXT} ({listed}) {ANY_TEXT})"

    def _regex(self, given: Node, where: str, _depth: int) -> str:
        return self._writer.regex(_text(given, "pattern", where))

    def _grammar(self, given: Node, where: str, _depth: int) -> str:
        return self._writer.grammar(_text(given, "grammar", where))

    def _sequence(self, given: Node, where: str, depth: int) -> str:
        return self._writer.rule(" ".join(self._nodes(given, "elements", where, depth)))

    def _either(self, given: Node, where: str, depth: int) -> str:
        return self._writer.rule(" | ".join(self._nodes(given, "elements", where, depth)))

    def _tag(self, given: Node, where: str, depth: int) -> str:
        begin = self._writer.literal(_text(given, "begin", where))
        return self._writer.rule(f"{begin} {self._rest_of_tag(given, where, depth)}")

    def _rest_of_tag(self, given: Node, where: str, depth: int) -> str:
        """Content and end of a tag."""
        ends = _ends(given, where)
        content = given.get("content")
        inside = self.node(content, f"{where}.content", depth + 1)
        is_text = all(end and self._writer.literal(end) == quoted(end) for end in ends)
        if isinstance(content, dict) and content.get("type") == "any_text" and is_text:
            # Text may not swallow the end that follows it.
            text = self._text_without(_excludes(content, f"{where}.content"))
            return self._writer.lazy(f"({text}) ({' | '.join(map(quoted, ends))})")
        last = " | ".join(self._writer.literal(end) for end in ends)
        return f"{inside} ({last})"

    def _triggered(self, given: Node, where: str, depth: int) -> str:
        """Free text with tags in it: behind a trigger nothing else may stand."""
        writer = self._writer
        parts = self._triggered_parts(given, where, depth)
        triggers = _list(given, "triggers", where)
        free = [*map(str, triggers), *_excludes(given, where)]
        text = writer.terminal(self._text_without(free))
        inner = writer.rule(" | ".join(parts))
        if given.get("stop_after_first"):
            return writer.rule(inner if given.get("at_least_one") else f"{inner} | {text}")
        count = "+" if given.get("at_least_one") else "*"
        return writer.rule(f"({inner}){count} {text}")

    def _triggered_parts(self, given: Node, where: str, depth: int) -> list[str]:
        """Free text up to a trigger and the tags that it may begin, for each trigger."""
        triggers = _list(given, "triggers", where)
        tags = _list(given, "tags", where)
        excludes = _excludes(given, where)
        found: dict[str, list[str]] = {}
        for place, tag in enumerate(tags):
            at = f"{where}.tags[{place}]"
            if not isinstance(tag, dict):
                raise refused(_FIELD, f"{at} must be an object")
            _check_keys(tag, "tag", at)
            begin = _text(tag, "begin", at)
            trigger = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), "")
            if not trigger:
                raise refused(_FIELD, f"{at}.begin starts with none of the triggers")
            rest = begin[len(trigger) :]
            body = f"{self._writer.literal(rest)} " if rest else ""
            body += self._rest_of_tag(tag, at, depth)
            found.setdefault(trigger, []).append(self._writer.rule(body))
        return [
            self._writer.rule(f"{self._up_to(trigger, excludes)} ({' | '.join(bodies)})")
            for trigger, bodies in found.items()
        ]

    def _up_to(self, trigger: str, excludes: Sequence[str]) -> str:
        literal, text = self._writer.literal(trigger), self._text_without(excludes)
        if literal == quoted(trigger):
            return self._writer.lazy(f"({text}) {literal}")
        return f"{self._writer.terminal(text)} {literal}"

    def _separated(self, given: Node, where: str, depth: int) -> str:
        tags = _list(given, "tags", where)
        parts = [
            self._tag(tag, f"{where}.tags[{place}]", depth + 1)
            if isinstance(tag, dict)
            else self.node(tag, f"{where}.tags[{place}]", depth + 1)
            for place, tag in enumerate(tags)
        ]
        writer = self._writer
        one = writer.rule(" | ".join(parts))
        separator = _text(given, "separator", where, is_empty_allowed=True)
        between = f"{writer.literal(separator)} " if separator else ""
        many = one if given.get("stop_after_first") else f"{one} ({between}{one})*"
        return writer.rule(many if given.get("at_least_one") else f"({many})?")

    def _nodes(self, given: Node, name: str, where: str, depth: int) -> list[str]:
        return [
            self.node(each, f"{where}.{name}[{place}]", depth + 1)
            for place, each in enumerate(_list(given, name, where))
        ]


def _check_keys(given: Node, kind: str, where: str) -> None:
    known = ("type", *_KEYS[kind])
    for name in given:
        if name not in known:
            raise refused(_FIELD, f"{where}.{name} is not one of {', '.join(known)}")


def _excludes(given: Node, where: str) -> list[str]:
    """Texts that free text may not have in it."""
    found = given.get("excludes", [])
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise refused(_FIELD, f"{where}.excludes must be an array of texts")
    return found


def _ends(given: Node, where: str) -> list[str]:
    """How a tag may end: one text, which may be empty, or one of several."""
    end = given.get("end")
    if not isinstance(end, list):
        return [_text(given, "end", where)]
    if not end or not all(isinstance(text, str) for text in end):
        raise refused(_FIELD, f"{where}.end must be a text or an array of texts")
    return end


def _list(given: Node, name: str, where: str) -> Sequence[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise refused(_FIELD, f"{where}.{name} must be an array that is not empty")
    return value


def _text(given: Node, name: str, where: str, *, is_empty_allowed: bool = False) -> str:
    value = given.get(name)
    is_text = isinstance(value, str) and (value or is_empty_allowed or name == "end")
    if not is_text:
        raise refused(_FIELD, f"{where}.{name} must be a text")
    return str(value)
