"""Writes a grammar in the engine's notation: rules of Lark, with other grammars beside it by name.

Whatever a client wrote stands in a grammar of its own or in a quoted literal, never in our rules.
"""

import json
from typing import Any

from llguidance import regex_to_lark

from services.worker.grammar.vocabulary import EngineVocabulary
from shared.errors import FailureReason, RequestError

# Any text: control tokens are none.
ANY_TEXT = r"/(?s:.*)/"


class GrammarWriter:
    """Gathers rules; names are its own."""

    def __init__(self, vocabulary: EngineVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lines: list[str] = []
        self._others: list[dict[str, Any]] = []
        self._known: dict[str, str] = {}
        self._count = 0

    def rule(self, body: str) -> str:
        """A rule, by its name; equal rules are one."""
        return self._define("r", body)

    def terminal(self, body: str) -> str:
        """A run of text that the lexer reads as one."""
        return self._define("T", body)

    def lazy(self, body: str) -> str:
        """A run of text that ends at the first place where it can."""
        return self._define("Z", body, "[lazy]")

    def regex(self, pattern: str) -> str:
        """A text that an expression matches as a whole."""
        return self.terminal(regex_terminal(pattern))

    def schema(self, schema: dict[str, Any]) -> str:
        """JSON of a schema that has its options."""
        return self._beside({"json_schema": schema})

    def grammar(self, lark: str) -> str:
        """Another grammar."""
        return self._beside({"lark_grammar": lark})

    def literal(self, text: str) -> str:
        """This text; spellings of control tokens in it are those tokens."""
        pieces = self._vocabulary.split_control(text)
        return " ".join(token(p) if isinstance(p, int) else quoted(p) for p in pieces) or '""'

    def finish(self, start: str) -> str:
        """The whole grammar."""
        main = "\n".join([f"start: {start}", *self._lines])
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._others]})

    def _define(self, kind: str, body: str, mark: str = "") -> str:
        key = kind + mark + body
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = self._name(kind)
            # Marks belong to rules; a lazy rule of one terminal is a lexeme.
            self._lines.append(f"{name.lower() if mark else name}{mark}: {body}")
        return name.lower() if mark else name

    def _beside(self, grammar: dict[str, Any]) -> str:
        key = json.dumps(grammar, sort_keys=False)
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = self._name("g")
            self._others.append({"name": name, **grammar})
        return f"@{name}"

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"


def token(token_id: int) -> str:
    """One control token."""
    return f"<[{token_id}]>"


def quoted(text: str) -> str:
    """A literal of ordinary text."""
    return json.dumps(text, ensure_ascii=False)


def regex_terminal(pattern: str) -> str:
    """An expression inside a terminal; digits are ASCII's, as in JSON Schema."""
    return f"/{regex_to_lark(pattern, 'd')}/"


def refused(field: str, message: str) -> RequestError:
    """A part of a constraint that cannot be used; what is more exact follows a colon."""
    part = field.partition(":")[0]
    path = part if part == "constraint" else f"constraint.{part}"
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field}: {message}", field=path)
