"""One live request: its sequences upstream, its choices, its verdict and its one end.

No clock, no sockets: the time comes as an argument, everything that happens comes as a call, and
`on_change` says that there is something to show. A request that was admitted ends exactly once,
with `TextFinished` or a `RequestError`, whatever comes in which order.
"""

import logging
from collections.abc import Callable, Sequence

from services.detokenizer.choice import Choice
from services.detokenizer.messages import (
    OutputOddities,
    SequenceFinished,
    TextEnd,
    TextFinished,
    TokenSubmit,
)
from services.detokenizer.ports import Upstream
from services.detokenizer.time_limits import TimeLimits
from services.detokenizer.usage import Usage, total_stats
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.sampling import SequenceStats, TokenLogprobs
from shared.tracing import Span

_logger = get_logger(__name__)


class Response:
    """A `SequenceListener` that turns what it hears into choices and an end."""

    def __init__(
        self,
        request_id: str,
        choices: Sequence[Choice],
        *,
        count: Callable[[], Usage],
        limits: TimeLimits,
        span: Span,
    ) -> None:
        """Wait for `start`."""
        self.request_id = request_id
        self.choices = tuple(choices)
        self.refusal: RequestError | None = None
        self.is_admitted = False
        self.end: TextEnd | None = None
        self.on_change: Callable[[], None] = _nothing
        self._count = count
        self._limits = limits
        self._span = span
        self._upstream: Upstream | None = None
        self._stream_ids: list[int] = []
        self._is_open_upstream = [False] * len(choices)
        self._num_undecided = len(choices)

    @property
    def traceparent(self) -> str:
        """Trace context for whoever works below this request."""
        return self._span.traceparent

    @property
    def is_over(self) -> bool:
        """Whether the verdict was a refusal or the end is known."""
        return self.refusal is not None or self.end is not None

    def start(self, upstream: Upstream, submit: TokenSubmit) -> None:
        """Send the sequences on their way; a `RequestError` counts as refusal."""
        self._upstream = upstream
        _logger.debug("submitted", extra={"request_id": self.request_id})
        try:
            self._stream_ids = upstream.submit(submit, self)
        except RequestError as error:
            self._fail(error, AbortReason.CANCELLED)
            return
        self._is_open_upstream = [True] * len(self.choices)

    # ---- from the scheduler ----

    def on_verdict(self, position: int, refusal: RequestError | None) -> None:
        """All sequences are admitted, or the request is refused."""
        if refusal is not None:
            self._is_open_upstream[position] = False
            self._fail(refusal, AbortReason.CANCELLED)
            return
        self._num_undecided -= 1
        if self._num_undecided == 0 and not self.is_over:
            self.is_admitted = True
            self.on_change()

    def on_start(self, position: int, stats: SequenceStats) -> None:
        """What is known of a sequence before its first tokens are told."""
        self.choices[position].stats = stats

    def on_drafts(self, position: int, num_drafted: int, num_accepted: int) -> None:
        """Drafts of a sequence so far."""
        choice = self.choices[position]
        choice.num_drafted_tokens, choice.num_accepted_tokens = num_drafted, num_accepted

    def on_tokens(
        self,
        position: int,
        num_previous: int,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> None:
        """New tokens of one sequence."""
        if self.end is not None or self.refusal is not None:  # as `is_over`, for every token
            return
        choice = self.choices[position]
        if num_previous != choice.num_received:
            message = f"tokens {choice.num_received} to {num_previous} of a sequence are missing"
            self._fail(RequestError(FailureReason.INTERNAL, message), AbortReason.CANCELLED)
            return
        choice.feed(ids, logprobs)
        if choice.is_stopped and self._is_open_upstream[position]:
            self._abort_one(position, AbortReason.STOP_STRING, choice.num_tokens)
            self._finish_if_complete()
        self.on_change()

    def on_prompt_logprobs(
        self, position: int, start: int, entries: Sequence[TokenLogprobs]
    ) -> None:
        """What the prompt of one sequence is worth."""
        if self.is_over:
            return
        if not self.choices[position].take_prompt_logprobs(start, entries):
            message = f"logprobs of a prompt are missing before token {start}"
            self._fail(RequestError(FailureReason.INTERNAL, message), AbortReason.CANCELLED)

    def on_end(self, position: int, end: SequenceFinished | RequestError) -> None:
        """One sequence is over; a bad end of one is the end of all."""
        self._is_open_upstream[position] = False
        if isinstance(end, RequestError):
            self._fail(self._limits.named(end), AbortReason.CANCELLED)
        elif end.reason is FinishReason.ABORT:
            error = RequestError(FailureReason.CANCELLED, "the request was aborted")
            self._fail(error, AbortReason.CANCELLED)
        elif not self.is_over:
            self.choices[position].finish(end)
            self._finish_if_complete()
            self.on_change()

    def on_resumed(self, position: int, num_tokens: int) -> None:
        """One sequence goes on, at another scheduler or at the one that was lost."""
        facts = {"position": position, "num_tokens": num_tokens}
        _logger.info("goes on after a loss", extra={"request_id": self.request_id, **facts})
        self._span.event("resumed", facts)

    def on_fault(self, error: RequestError) -> None:
        """A bug of ours: this request ends."""
        self._fail(error, AbortReason.CANCELLED)

    # ---- from the reader's side ----

    def abort(self, error: RequestError, reason: AbortReason = AbortReason.CANCELLED) -> None:
        """End the request from this side. Idempotent."""
        self._fail(error, reason)

    def give_up(self, error: RequestError, reason: AbortReason = AbortReason.SLOW_READER) -> None:
        """The reader does not read, or is gone: also an answer that is complete is lost then."""
        if isinstance(self.end, TextFinished):
            self.end = error
            self.on_change()
        self._fail(error, reason)

    def check_deadline(self, now: float) -> None:
        """Fail once the time is up; the scheduler is told the same limits and is usually first."""
        if self.is_over:
            return
        has_first = all(choice.num_received or choice.end is not None for choice in self.choices)
        error = self._limits.error_at(now, has_first_tokens=has_first)
        if error is not None:
            self._fail(error, AbortReason.CANCELLED)

    def _fail(self, error: RequestError, reason: AbortReason) -> None:
        for position, is_open in enumerate(self._is_open_upstream):
            if is_open:
                self._abort_one(position, reason, 0)
        if self.is_over:
            return
        if self.is_admitted:
            self.end = error
        else:
            self.refusal = error
        reason_name = error.reason.name
        is_cancelled = error.reason is FailureReason.CANCELLED
        _logger.log(
            logging.DEBUG if is_cancelled else logging.INFO,
            "request failed",
            extra={"request_id": self.request_id, "reason": reason_name},
        )
        if is_cancelled:  # nobody's fault
            self._span.set("reason", reason_name)
        else:
            self._span.fail(reason_name)
        self._close_span()
        self.on_change()

    def _abort_one(self, position: int, reason: AbortReason, num_tokens_kept: int) -> None:
        self._is_open_upstream[position] = False
        if self._upstream is not None:
            self._upstream.abort(self._stream_ids[position], reason, num_tokens_kept)

    def _finish_if_complete(self) -> None:
        if self.is_over or any(choice.end is None for choice in self.choices):
            return
        first = self.choices[0].end
        reason = FinishReason.STOP if first and first.is_stop else FinishReason.LENGTH
        # Tokens prove admission, should a verdict have been lost on the way.
        self.is_admitted = True
        self.end = TextFinished(
            stats=total_stats(self.choices, self._count()),
            reason=reason,
            oddities=self._oddities(),
        )
        self._close_span()

    def _close_span(self) -> None:
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        _logger.debug("ended", extra={"request_id": self.request_id, "num_tokens": num_tokens})
        self._span.set("num_output_tokens", num_tokens)
        self._note_oddities()
        self._span.end()

    def _oddities(self) -> OutputOddities:
        texts = [choice.text for choice in self.choices]
        return OutputOddities(
            num_unclosed_reasoning=sum(text.is_reasoning for text in texts),
            num_dropped_calls=sum(text.num_dropped_calls for text in texts),
            num_unreadable_calls=sum(text.num_unreadable_calls for text in texts),
        )

    def _note_oddities(self) -> None:
        """Tell what the model did not do as its dialect wants it."""
        if found := self._oddities().found:
            _logger.info("odd output", extra={"request_id": self.request_id, **found})
            for name, count in found.items():
                self._span.set(name, count)


def _nothing() -> None:
    """Nobody listens yet."""
