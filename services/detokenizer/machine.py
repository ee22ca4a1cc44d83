"""The GLM output machine: token ids -> reasoning, content and tool calls.

It runs on ids, not on text: control tokens switch states, everything else is text of the current
field. So the cost per token is constant, text that only looks like a tag stays text, and the result
is a function of the token sequence alone, however it is grouped. The rules, also those for outputs
that no template defines, are listed in docs/output-machine.md.

    REASONING --</think>--> CONTENT --<tool_call>--> CALL --</tool_call>--> CONTENT
        `-----<tool_call>------------------------------^      <think> leads back to REASONING
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from services.detokenizer.calls import CallParser, CallRules, Ended
from services.detokenizer.delta import Delta, ToolPiece
from services.detokenizer.stops import StopMatcher
from services.detokenizer.text import IncrementalDecoder
from shared.glm.tokenizer import Vocabulary


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRules:
    """What the request says about its output."""

    calls: CallRules
    starts_in_reasoning: bool
    # Without it think tags are text of the content.
    parses_reasoning: bool = True


class OutputMachine:
    """One choice. Push token by token, take the delta whenever one is wanted, finish once."""

    num_decoded_chars = 0  # offsets are told for completions only

    def __init__(
        self,
        vocabulary: Vocabulary,
        rules: MachineRules,
        *,
        make_id: Callable[[], str],
        stops: StopMatcher | None = None,
    ) -> None:
        """Start where the prompt ended."""
        self._added_ids = vocabulary.added_ids
        self._strings = vocabulary.token_strings
        self._control = vocabulary.control
        self._rules = rules
        self._decoder = IncrementalDecoder(vocabulary)
        self._stops = stops
        self._calls = CallParser(vocabulary, rules.calls, self._show_piece, make_id)
        self._state = _State.CONTENT
        self._on_text: Callable[[str], None] = self._content_text
        # Whitespace that may have to be dropped; lists, because a model can get lost in it.
        self._held_reasoning: list[str] = []
        self._held_space: list[str] = []
        self._is_behind_call = False
        self.num_reasoning_tokens = 0
        self.delta = Delta()
        if rules.starts_in_reasoning and rules.parses_reasoning:
            self._enter_reasoning()

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._state is _State.REASONING

    @property
    def is_content(self) -> bool:
        """Whether the next text is content."""
        return self._state is _State.CONTENT

    def reads_as_content(self, token: int) -> bool:
        """Whether a token is text of the content, rather than of reasoning, a call or a marker."""
        return self._state is _State.CONTENT and token not in self._added_ids

    @property
    def pending(self) -> bytes:
        """Bytes of an incomplete character."""
        return self._decoder.pending

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._calls.num_complete

    @property
    def num_dropped_calls(self) -> int:
        """Calls that were read and not shown: unknown or not allowed tools, cut names."""
        return self._calls.num_dropped

    @property
    def num_unreadable_calls(self) -> int:
        """Texts behind a call's opening tag that were no call; they are content."""
        return self._calls.num_unreadable

    @property
    def matched(self) -> str | None:
        """The stop string that ended the content."""
        return self._stops.matched if self._stops is not None else None

    def arm(self) -> None:
        """Let stop strings match from now on."""
        if self._stops is not None:
            self._stops.is_armed = True

    def push(self, token: int) -> None:
        """One token of the output."""
        if token in self._added_ids:
            self._marker(token)
            return
        if self._state is _State.REASONING:
            self.num_reasoning_tokens += 1
        text = self._decoder.push(token)
        if text:
            self._on_text(text)

    def finish(self, *, is_cut: bool) -> None:
        """The output is over; `is_cut` says that the model did not end it by itself."""
        self._flush_decoder()
        if self._state is _State.CALL:
            self._release(self._calls.finish(is_cut=is_cut))
        if self._stops is not None:
            self._content(self._stops.flush())
        if not self._is_behind_call:
            self._emit_content("".join(self._held_space))
        self._held_space = []

    def take(self) -> Delta:
        """What came since the last take."""
        delta, self.delta = self.delta, Delta()
        return delta

    # ---- control tokens ----

    def _marker(self, token: int) -> None:
        self._flush_decoder()
        if self._state is _State.CALL:
            self._marker_in_call(token)
            return
        control = self._control
        if not self._rules.parses_reasoning and token in (control.think, control.end_think):
            self._on_text(self._strings[token])
        elif token == control.tool_call:
            self._enter_call()
        elif token == control.think:
            self._enter_reasoning()
        elif token == control.end_think:
            self._enter_content()
        # Any other marker has no meaning here and is not shown.

    def _marker_in_call(self, token: int) -> None:
        ended = self._calls.control(token)
        if ended is Ended.YES:
            self._enter_content()
        elif ended is Ended.REOPENED:
            self._enter_call()
        elif ended is Ended.RECOVERED:
            self._release(self._calls.take_recovered())
            self._enter_content()
            self._marker(token)

    def _enter_reasoning(self) -> None:
        self._state = _State.REASONING
        self._on_text = self._reasoning_text

    def _enter_content(self) -> None:
        self._state = _State.CONTENT
        self._on_text = self._content_text
        self._held_reasoning = []

    def _enter_call(self) -> None:
        self._state = _State.CALL
        self._on_text = self._call_text
        self._held_reasoning = []
        self._calls.start()

    # ---- text ----

    def _flush_decoder(self) -> None:
        text = self._decoder.flush()
        if text:
            self._on_text(text)

    def _reasoning_text(self, text: str) -> None:
        """Whitespace waits: at the end of the reasoning it is dropped."""
        kept = text.rstrip()
        if kept:
            self.delta.reasoning.append("".join(self._held_reasoning) + kept)
            self._held_reasoning = [text[len(kept) :]]
        else:
            self._held_reasoning.append(text)

    def _content_text(self, text: str) -> None:
        self._content(text if self._stops is None else self._stops.push(text))

    def _call_text(self, text: str) -> None:
        if not self._calls.text(text):
            recovered = self._calls.take_recovered()
            self._enter_content()
            self._release(recovered)

    def _content(self, text: str) -> None:
        """Whitespace waits: directly before a call it is dropped."""
        if not text:
            return
        kept = text.rstrip()
        if kept:
            self._emit_content("".join(self._held_space) + kept)
            self._held_space = [text[len(kept) :]]
        else:
            self._held_space.append(text)

    def _release(self, text: str) -> None:
        """Text that a call turned out to be: shown with the whitespace around it."""
        if not text:
            return
        if self._stops is not None:
            text = self._stops.push(text)
        held, self._held_space = self._held_space, []
        self._emit_content("".join(held) + text)

    def _emit_content(self, text: str) -> None:
        if text:
            self._is_behind_call = False
            self.delta.content.append(text)

    def _show_piece(self, piece: ToolPiece) -> None:
        if piece.call_id:
            if self._stops is not None:
                self._content(self._stops.flush())
            self._held_space = []
            self._is_behind_call = True
        self.delta.tools.append(piece)
