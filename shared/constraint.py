"""What the output of a request may look like: plain values, the fields are those of glm.v1.

The worker builds a grammar of it; nobody else reads more than its size. A `Constraint` says what
the text behind the thinking is: a format, tool calls in the model's own form, or either of both.
"""

import enum
from dataclasses import dataclass

# Bytes of all texts of a constraint: a larger one is no schema anybody wrote.
MAX_CONSTRAINT_BYTES = 1 << 20
MAX_CHOICES = 4096


class FormatKind(enum.IntEnum):
    """What describes the text; the numbers are those of glm.v1.TextFormatKind."""

    JSON_OBJECT = 1
    JSON_SCHEMA = 2
    REGEX = 3
    CHOICE = 4
    GRAMMAR = 5
    STRUCTURAL_TAG = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """A form of text.

    Attributes:
        kind: What describes it.
        text: The schema, expression, grammar or tag; empty for the other kinds.
        choices: The texts of a choice.
        is_strict: Whether keywords of a schema that cannot be enforced are refused.
        has_whitespace: Whether JSON may have blanks and line breaks between its parts.
        whitespace_pattern: What stands between the parts of JSON instead; empty for the usual.
    """

    kind: FormatKind
    text: str = ""
    choices: tuple[str, ...] = ()
    is_strict: bool = False
    has_whitespace: bool = True
    whitespace_pattern: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of its texts."""
        texts = (self.text, self.whitespace_pattern, *self.choices)
        return sum(len(text.encode("utf-8", "replace")) for text in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool that may be called; `parameters_json` is empty when none were declared."""

    name: str
    parameters_json: str = ""
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which calls there may be. Not required ones may stand anywhere in ordinary text."""

    tools: tuple[CalledTool, ...]
    is_required: bool = False
    is_parallel: bool = True

    @property
    def num_bytes(self) -> int:
        """Size of its texts."""
        return sum(len(t.name.encode()) + len(t.parameters_json.encode()) for t in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A format, calls, or both; it holds behind `start_after_token_id` if that is set."""

    format: TextFormat | None = None
    calls: CallRules | None = None
    start_after_token_id: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of its texts."""
        return sum(part.num_bytes for part in (self.format, self.calls) if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOrder:
    """A constraint that is to be made ready.

    Attributes:
        constraint: As it stands in the sampling of the request.
        request_id: For logs and traces.
        tenant_id: Whose it is: who waits for a turn takes turns with other tenants.
        traceparent: W3C trace context; empty when the request is not traced.
    """

    constraint: Constraint
    request_id: str
    tenant_id: str = ""
    traceparent: str = ""
