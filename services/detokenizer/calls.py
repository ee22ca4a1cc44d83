"""One tool call in the output: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...`.

States: NAME -> KEY -> GAP -> VALUE -> CLOSED -> KEY or the end. Tags come as control tokens, all
else as text of the current state. What the model gets wrong is read by these rules:

- Names and keys are trimmed, whitespace between tags means nothing, values are kept as they are.
- `</arg_value>` closes a value only if a key or the end of the call follows; else it, and any
  other tag inside a value, is part of the value. `</tool_call>` closes whatever is open.
- A key without `<arg_value>` takes the text behind it as its value; of equal keys the first counts.
- `<tool_call>` outside a value begins the next call: what precedes it is a complete call, or text
  if it is no name of a tool (`Ended.RECOVERED`).
- A call whose tool is not allowed is read to its end and not shown. What can be no call is text.

String values are shown as they come, other values when they are complete. The pieces of a call that
ended with `is_complete` join to one strict JSON object.
"""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.detokenizer.body import read_json_call
from services.detokenizer.delta import ToolPiece
from services.detokenizer.schema import ArgumentTypes, escape, quote, to_json
from shared.argument_types import Types
from shared.glm.tokenizer import Vocabulary

# No tool name is longer; a longer text behind <tool_call> is prose and is not held back.
_MAX_NAME_CHARS = 256
# What a name that was cut off looks like.
_NAME_LIKE = re.compile(r"[\w.-]*\Z")


class _State(enum.Enum):
    NAME = enum.auto()
    KEY = enum.auto()
    GAP = enum.auto()
    VALUE = enum.auto()
    CLOSED = enum.auto()


class Ended(enum.Enum):
    """What a control token did to the call."""

    NO = enum.auto()
    # The call is over.
    YES = enum.auto()
    # The call is over and the token opens the next one.
    REOPENED = enum.auto()
    # There was no call: `take_recovered` has its text, and the token is still to be read.
    RECOVERED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which calls a request allows and what their arguments are."""

    tools: Mapping[str, ArgumentTypes]
    # Names that may be shown; a subset of `tools`, empty when tool_choice is none.
    allowed: frozenset[str]


class CallParser:
    """Reads one call after the other; `show` gets the pieces, indexes are dense."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        rules: CallRules,
        show: Callable[[ToolPiece], None],
        make_id: Callable[[], str],
    ) -> None:
        """Start outside any call; `make_id` names calls."""
        self._vocabulary = vocabulary
        self._control = vocabulary.control
        self._rules = rules
        self._show = show
        self._make_id = make_id
        self.num_complete = 0
        self.num_dropped = 0
        self.num_unreadable = 0
        self._next_index = 0
        self._recovered = ""
        self.start()

    def start(self) -> None:
        """A `<tool_call>` was read."""
        self._state = _State.NAME
        self._parts: list[str] = []
        self._num_chars = 0
        self._is_json = False
        self._key = ""
        self._index = -1  # of a shown call
        self._types: ArgumentTypes | None = None
        self._keys: set[str] = set()
        self._value_types: Types | None = None
        self._is_value_shown = False
        self._pending_close: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether a call is shown that has not ended."""
        return self._index >= 0

    def text(self, text: str) -> bool:
        """Ordinary text; False when it proves that there is no call (see `take_recovered`)."""
        state = self._state
        if state is _State.VALUE:
            self._add_to_value(text)
        elif state is _State.CLOSED:
            self._reconsider(text)
        else:
            self._parts.append(text)
            if state is _State.NAME:
                return self._may_be_name(text)
        return True

    def control(self, token: int) -> Ended:
        """A control token."""
        handler = {
            _State.NAME: self._in_name,
            _State.KEY: self._in_key,
            _State.GAP: self._in_gap,
            _State.VALUE: self._in_value,
            _State.CLOSED: self._in_closed,
        }[self._state]
        return handler(token)

    def take_recovered(self) -> str:
        """Text that turned out to be no call."""
        text = "".join(self._parts)
        self._parts = []
        if not text.strip():
            return ""
        self.num_unreadable += 1
        return text

    def finish(self, *, is_cut: bool) -> str:
        """The output is over inside the call; returns text that is no call.

        A model that ended by itself has left out closing tags, and the call counts. One that was
        cut leaves its call incomplete, and a name that was cut is nobody's text.
        """
        if self._state is not _State.NAME:
            if not is_cut:
                if self._state is _State.GAP:
                    self._take_gap()
                self._end_call(self._control.end_tool_call)
            return ""
        if not is_cut and self._is_call():
            self._end_name_only()
            return ""
        text = "".join(self._parts)
        if is_cut and (self._is_json or _NAME_LIKE.match(text.strip())):
            self.num_dropped += bool(text.strip())
            return ""
        return self.take_recovered()

    # ---- one method per state: a control token arrives ----

    def _in_name(self, token: int) -> Ended:
        control = self._control
        if token == control.end_tool_call:
            if not self._is_call():
                return Ended.RECOVERED
            self._end_name_only()
            return Ended.YES
        if token == control.arg_key:
            self._open_call()
            self._state = _State.KEY
        elif token == control.arg_value:  # a value without a key belongs to nothing
            self._open_call()
            self._begin_value(None)
        elif token in (control.tool_call, control.think, control.end_think):
            if "".join(self._parts).strip() in self._rules.allowed:
                self._end_name_only()  # its closing tag is missing
            return Ended.RECOVERED
        return Ended.NO

    def _in_key(self, token: int) -> Ended:
        control = self._control
        if token == control.end_arg_key:
            self._state = _State.GAP
            self._key = "".join(self._parts).strip()
            self._parts = []
        elif token == control.arg_value:
            self._begin_value("".join(self._parts).strip())
        elif token == control.arg_key:
            self._parts = []
        elif token in (control.end_tool_call, control.tool_call):
            return self._end_call(token)
        return Ended.NO

    def _in_gap(self, token: int) -> Ended:
        control = self._control
        if token == control.arg_value:
            self._begin_value(self._key)
        elif token == control.end_arg_value:
            self._take_gap()
            self._state = _State.CLOSED
            self._pending_close = [self._spelling(token)]
        elif token == control.arg_key:
            self._take_gap()
            self._close_argument()
            self._state = _State.KEY
        elif token in (control.end_tool_call, control.tool_call):
            self._take_gap()
            return self._end_call(token)
        return Ended.NO

    def _in_value(self, token: int) -> Ended:
        control = self._control
        if token == control.end_arg_value:
            self._state = _State.CLOSED
            self._pending_close = [self._spelling(token)]
        elif token == control.end_tool_call:
            return self._end_call(token)
        elif token not in self._vocabulary.special_ids:
            self._add_to_value(self._spelling(token))
        return Ended.NO

    def _in_closed(self, token: int) -> Ended:
        control = self._control
        if token == control.arg_key:
            self._close_argument()
            self._state = _State.KEY
        elif token in (control.end_tool_call, control.tool_call):
            return self._end_call(token)
        elif token not in self._vocabulary.special_ids:
            self._reopen_value()
            return self._in_value(token)
        return Ended.NO

    # ---- the parts of a call ----

    def _open_call(self) -> None:
        name = "".join(self._parts).strip()
        self._parts = []
        if name not in self._rules.allowed:
            self.num_dropped += 1
            self._types = self._rules.tools.get(name)
            return
        self._types = self._rules.tools[name]
        self._index = self._next_index
        self._next_index += 1
        self._show(ToolPiece(self._index, self._make_id(), name))

    def _is_call(self) -> bool:
        """Whether what came so far can be a name or a call, rather than prose."""
        text = "".join(self._parts).strip()
        if text in self._rules.allowed or _NAME_LIKE.match(text):
            return True
        return self._is_json and read_json_call(text) is not None

    def _end_name_only(self) -> None:
        """`</tool_call>` right behind the name: no arguments, or a call written as JSON."""
        name = "".join(self._parts).strip()
        arguments = "{}"
        if self._is_json:
            name, arguments = read_json_call(name) or (name, arguments)
        self._parts = []
        if name in self._rules.allowed:
            self._show(ToolPiece(self._next_index, self._make_id(), name, arguments))
            self._next_index += 1
            self.num_complete += 1
        elif name:
            self.num_dropped += 1

    def _end_call(self, token: int) -> Ended:
        self._close_argument()
        self._close_call()
        return Ended.REOPENED if token == self._control.tool_call else Ended.YES

    def _close_call(self) -> None:
        if self._index >= 0:
            self._show(ToolPiece(self._index, arguments="}" if self._keys else "{}"))
            self._index = -1
            self.num_complete += 1

    def _begin_value(self, key: str | None) -> None:
        self._state = _State.VALUE
        self._parts = []
        self._is_value_shown = bool(key) and key not in self._keys and self._index >= 0
        if not self._is_value_shown or key is None:
            return
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        self._value_types = self._types.of(key) if self._types else None
        quoted = '"' if self._value_types is None else ""
        self._show(ToolPiece(self._index, arguments=f"{opening}{quote(key)}: {quoted}"))

    def _add_to_value(self, text: str) -> None:
        if not self._is_value_shown:
            return
        if self._value_types is None:
            self._show(ToolPiece(self._index, arguments=escape(text)))
        else:
            self._parts.append(text)

    def _take_gap(self) -> None:
        """The text behind a key is its value; a line break before it is layout."""
        text = "".join(self._parts).lstrip("\n")
        self._begin_value(self._key)
        self._add_to_value(text)

    def _close_argument(self) -> None:
        """End the value that is open, if one is."""
        if self._state not in (_State.VALUE, _State.CLOSED):
            self._parts = []
            return
        if self._is_value_shown:
            closing = '"'
            if self._value_types is not None:
                closing = to_json("".join(self._parts), self._value_types)
            self._show(ToolPiece(self._index, arguments=closing))
        self._is_value_shown = False
        self._parts = []

    def _reconsider(self, text: str) -> None:
        """Text behind `</arg_value>`: layout if blank, else the tag was part of the value."""
        if text.strip():
            self._reopen_value()
            self._add_to_value(text)
        else:
            self._pending_close.append(text)

    def _reopen_value(self) -> None:
        self._state = _State.VALUE
        self._add_to_value("".join(self._pending_close))
        self._pending_close = []

    def _may_be_name(self, text: str) -> bool:
        if self._num_chars == 0:
            text = text.lstrip()
            self._is_json = text.startswith("{")
        self._num_chars += len(text)
        return self._is_json or self._num_chars <= _MAX_NAME_CHARS

    def _spelling(self, token: int) -> str:
        return self._vocabulary.token_strings[token]
