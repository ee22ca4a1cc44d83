"""What it takes to submit a request once more, after its detokenizer was lost.

A request may move as long as none of its bytes has left for the client. Until then it is kept, its
prompts at four bytes per token; all requests together at most so many bytes.
"""

import asyncio
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from services.frontend.exchange import Exchange
from services.frontend.submission import Submission
from shared.errors import FailureReason, RequestError
from shared.tracing import Span, start_span

# A request that was on so many lost detokenizers is the likely cause.
MAX_LOSSES: Final = 3
# Between two looks of a request that waits, unless a detokenizer becomes ready before.
LOOK_S: Final = 0.25
FIRST_TOKEN_FIELD: Final = "first_token_timeout_ms"

PeerT = TypeVar("PeerT", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResubmitBounds:
    """How much is done for a request whose detokenizer is lost.

    Attributes:
        timeout_s: From each loss on; 0 is no second try.
        max_bytes: Kept of all requests together; those past it end with their detokenizer.
    """

    timeout_s: float = 10.0
    max_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a request may take from the time it came; 0 is no limit."""

    timeout_ms: int = 0
    first_token_timeout_ms: int = 0

    @classmethod
    def of(cls, submission: Submission) -> "Limits":
        """Those of a request."""
        return cls(
            timeout_ms=submission.timeout_ms,
            first_token_timeout_ms=submission.first_token_timeout_ms,
        )

    def error_at(self, passed_s: float, *, has_first_token: bool) -> RequestError | None:
        """Why the request ends after so long; None while it has time."""
        for is_first in (False, True):
            limit_ms = self.first_token_timeout_ms if is_first else self.timeout_ms
            is_over = limit_ms and int(limit_ms - passed_s * 1000) <= 0
            if is_over and not (is_first and has_first_token):
                return self.error(is_first=is_first)
        return None

    def error(self, *, is_first: bool) -> RequestError:
        """The end by one of them, by its name."""
        limit_ms = self.first_token_timeout_ms if is_first else self.timeout_ms
        what = "no token came" if is_first else "it did not end"
        return RequestError(
            FailureReason.DEADLINE_EXCEEDED,
            f"the request took too long: {what} within {limit_ms} ms",
            field=FIRST_TOKEN_FIELD if is_first else None,
        )


@dataclass(slots=True, eq=False)
class Job(Generic[PeerT]):
    """A request on its way; times are of the monotonic clock.

    Attributes:
        client: Whom it was submitted to.
        submission: To submit again; None when it will not be.
        num_kept_bytes: What that takes.
        started: When it came.
        limits: Its own, of which a detokenizer is told what is left.
        num_losses: Detokenizers that were lost with it.
        refused_by: Those that sent it on since.
        give_up_at: End of its waiting.
        error: Why it waits.
        is_paused: It waits for the next look, whatever becomes ready.
        look: The next look.
        span: From the loss to the next submit.
        has_moved: Whether it was submitted again.
    """

    client: PeerT
    submission: Submission | None
    num_kept_bytes: int
    started: float
    limits: Limits = field(default_factory=Limits)
    num_losses: int = 0
    refused_by: tuple[PeerT, ...] = ()
    give_up_at: float = 0.0
    error: RequestError | None = None
    is_paused: bool = False
    look: asyncio.TimerHandle | None = None
    span: Span | None = None
    has_moved: bool = False

    def may_move(self, exchange: Exchange) -> bool:
        """Whether it may begin anew elsewhere."""
        is_whole = not (exchange.has_left or exchange.is_ended)
        return self.submission is not None and is_whole

    def begin_move(self, exchange: Exchange, why: str) -> int:
        """Forget what came; the number of the attempt."""
        assert self.submission is not None
        exchange.restart()
        self.has_moved = True
        attempt = self.submission.attempt + 1
        self.submission = replace(self.submission, attempt=attempt)
        self.span = start_span(
            "resubmit",
            traceparent=self.submission.traceparent,
            attributes={
                "glm.request_id": exchange.request_id,
                "glm.attempt": attempt,
                "glm.cause": why,
            },
        )
        return attempt

    def end_wait(self, *, is_placed: bool) -> None:
        """No more looks."""
        if self.look is not None:
            self.look.cancel()
            self.look = None
        if self.span is not None:
            if not is_placed:
                self.span.fail("no detokenizer took it")
            self.span.end()
            self.span = None


def packed(submission: Submission) -> Submission:
    """The same with prompts that take four bytes per token."""
    arrays: dict[int, array[int]] = {}
    sequences = []
    for sequence in submission.sequences:
        ids = sequence.prompt_token_ids
        # The choices of one prompt share the list, and the array.
        if id(ids) not in arrays:
            arrays[id(ids)] = array("I", ids)
        sequences.append(replace(sequence, prompt_token_ids=arrays[id(ids)]))
    return replace(submission, sequences=tuple(sequences))


def in_time(submission: Submission, passed_s: float) -> Submission:
    """The request with what is left of its time; `RequestError` when nothing is."""
    error = Limits.of(submission).error_at(passed_s, has_first_token=False)
    if error is not None:
        raise error
    passed_ms = passed_s * 1000
    return replace(
        submission,
        timeout_ms=max(0, int(submission.timeout_ms - passed_ms)),
        first_token_timeout_ms=max(0, int(submission.first_token_timeout_ms - passed_ms)),
    )
