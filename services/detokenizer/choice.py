"""One choice of a response: counts its tokens, finds its end, keeps what was not shown yet.

A token that may be the ending one (end-of-sequence or stop id) waits until it is known: if another
token follows it was ordinary, if the sequence ends it is not text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from services.detokenizer.delta import Delta
from services.detokenizer.messages import SequenceFinished
from shared.endings import FinishReason
from shared.glm.tokenizer import Vocabulary
from shared.sampling import SequenceStats, TokenLogprobs


class TextMachine(Protocol):
    """Tokens in, deltas out: `OutputMachine` or `PlainText`."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside think blocks so far."""

    @property
    def num_decoded_chars(self) -> int:
        """Characters so far, where offsets are told."""

    @property
    def is_content(self) -> bool:
        """Whether the next text is content."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""

    @property
    def pending(self) -> bytes:
        """Bytes of an incomplete character."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""

    @property
    def num_calls(self) -> int:
        """Complete tool calls."""

    @property
    def num_dropped_calls(self) -> int:
        """Tool calls that are not shown."""

    @property
    def delta(self) -> Delta:
        """What came since the last take."""

    @property
    def num_unreadable_calls(self) -> int:
        """Texts behind a call's opening tag that were no call."""

    def arm(self) -> None:
        """Let stop strings match from now on."""

    def push(self, token: int) -> None:
        """One token."""

    def finish(self, *, is_cut: bool) -> None:
        """The output is over."""

    def take(self) -> Delta:
        """Hand over the delta and start a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """What the choices of a request have in common."""

    vocabulary: Vocabulary
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    min_tokens: int = 0
    has_stop_strings: bool = False
    shows_stop_token: bool = False
    keeps_logprobs: bool = False
    keeps_ids: bool = False
    # Reasoning is not shown: neither its logprobs nor its ids.
    hides_reasoning: bool = False
    # Nothing that is generated is shown or counted.
    is_prompt_only: bool = False
    # A named tool was asked for: its call is no reason of its own.
    is_named_call: bool = False


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """Log-probabilities of one token; `context` are the bytes of its unfinished character."""

    token_id: int
    context: bytes
    offset: int
    values: TokenLogprobs
    # Whether it is a token of the content, rather than of reasoning, a call or a marker.
    is_content: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """Why a choice ended; `stop_reason` is the stop string or the id of a stop token."""

    finish_reason: str
    stop_reason: str | int | None
    is_stop: bool


@dataclass(slots=True)
class Choice:
    """Tokens of one sequence; `is_stopped` says that a stop string ended it here."""

    index: int
    num_prompt_tokens: int
    text: TextMachine
    rules: ChoiceRules
    num_tokens: int = 0
    logprobs: list[LogprobEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceEnd | None = None
    # What the scheduler has told: at the first token, and again at its own end.
    stats: SequenceStats = field(default_factory=SequenceStats)
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    is_stopped: bool = False
    # Tokens that came from the scheduler, also those behind a stop string.
    num_received: int = 0
    # Packed ids of the prompt, where they are shown.
    prompt_token_ids: bytes = b""
    # The same, where their logprobs are shown, and those: of all tokens but the first.
    measured_token_ids: bytes = b""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    _waiting: int = -1

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """The next tokens; ignored once the choice has ended."""
        self.num_received += len(ids)
        if self.rules.is_prompt_only:
            return
        rules, keeps_more = self.rules, self.rules.keeps_ids or self.rules.keeps_logprobs
        for position, token in enumerate(ids):
            if self.end is not None or (self._waiting >= 0 and self._push_waiting()):
                return
            self.num_tokens += 1
            if keeps_more:
                self._note(token, logprobs[position] if logprobs else None)
            if token in rules.stop_ids:
                self._waiting = token
            elif rules.has_stop_strings:
                self._push(token)
            else:
                self.text.push(token)

    def take_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> bool:
        """Entries from a position on, some of them known already; False if some are missing."""
        num_known = 1 + len(self.prompt_logprobs)
        if start > num_known:
            return False
        self.prompt_logprobs += entries[num_known - start :]
        return True

    def finish(self, finished: SequenceFinished) -> None:
        """The scheduler says that the sequence has ended well."""
        self.stats = finished.stats
        self.num_drafted_tokens = finished.stats.num_drafted_tokens
        self.num_accepted_tokens = finished.stats.num_accepted_tokens
        if self.end is not None:
            return
        is_stop = finished.reason is FinishReason.STOP and not self.rules.is_prompt_only
        last = self._waiting
        if last >= 0 and (not is_stop or self.rules.shows_stop_token) and self._push_waiting():
            return
        ended_by = last if last >= 0 else finished.stop_token_id
        is_own_end = is_stop and (ended_by is None or ended_by in self.rules.eos_ids)
        self.text.finish(is_cut=not is_own_end)
        matched = self.text.matched
        self._set_end(
            is_stop=is_stop or matched is not None,
            stop_reason=finished.stop_token_id if matched is None else matched,
        )

    def full_stats(self) -> SequenceStats:
        """The scheduler's stats with our counts, which know where a stop string cut."""
        return replace(
            self.stats,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_tokens,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )

    def _push_waiting(self) -> bool:
        """The token that waited is ordinary; whether it ended the choice."""
        token, self._waiting = self._waiting, -1
        self._push(token)
        return self.end is not None

    def _push(self, token: int) -> None:
        rules = self.rules
        if rules.has_stop_strings:
            # More than min_tokens: the text of the first min_tokens tokens completes no match.
            if self.num_tokens > rules.min_tokens:
                self.text.arm()
            self.text.push(token)
            if self.text.matched is not None:
                self.is_stopped = True
                self.text.finish(is_cut=True)
                self._set_end(is_stop=True, stop_reason=self.text.matched)
        else:
            self.text.push(token)

    def _set_end(self, *, is_stop: bool, stop_reason: str | int | None) -> None:
        reason = "stop" if is_stop else "length"
        if is_stop and self.text.num_calls and not self.rules.is_named_call:
            reason = "tool_calls"
        self.end = ChoiceEnd(
            finish_reason=reason,
            stop_reason=stop_reason if is_stop else None,
            is_stop=is_stop,
        )

    def _note(self, token: int, values: TokenLogprobs | None) -> None:
        """Keep what is shown beside the text."""
        text, rules = self.text, self.rules
        if rules.hides_reasoning and text.is_reasoning:
            return
        if rules.keeps_ids:
            self.token_ids.append(token)
        if rules.keeps_logprobs and values is not None:
            is_content = text.is_content and token not in rules.vocabulary.added_ids
            self.logprobs.append(
                LogprobEntry(token, text.pending, text.num_decoded_chars, values, is_content)
            )
