"""What it takes to submit a request once more, after its detokenizer was lost.

A request may move as long as none of its bytes has left for the client. Until then it is kept, its
prompts at four bytes per token; all requests together at most so many bytes.
"""

import asyncio
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from services.frontend.exchange import Exchange
from services.frontend.submission import Submission
from shared.errors import FailureReason, RequestError
from shared.tracing import Span, start_span

# A request that was on so many lost detokenizers is the likely cause.
MAX_LOSSES: Final = 3
# Between two looks of a request that waits, unless a detokenizer becomes ready before.
LOOK_S: Final = 0.25

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


@dataclass(slots=True, eq=False)
class Job(Generic[PeerT]):
    """A request on its way; times are of the monotonic clock.

    Attributes:
        client: Whom it was submitted to.
        submission: To submit again; None when it will not be.
        num_kept_bytes: What that takes.
        started: When it came.
        num_losses: Detokenizers that were lost with it.
        refused_by: Those that sent it on since.
        give_up_at: End of its waiting.
        error: Why it waits.
        is_paused: It waits for the next look, whatever becomes ready.
        look: The next look.
        span: From the loss to the next submit.
    """

    client: PeerT
    submission: Submission | None
    num_kept_bytes: int
    started: float
    num_losses: int = 0
    refused_by: tuple[PeerT, ...] = ()
    give_up_at: float = 0.0
    error: RequestError | None = None
    is_paused: bool = False
    look: asyncio.TimerHandle | None = None
    span: Span | None = None

    def may_move(self, exchange: Exchange) -> bool:
        """Whether it may begin anew elsewhere."""
        is_whole = not (exchange.has_left or exchange.is_ended)
        return self.submission is not None and is_whole

    def begin_move(self, exchange: Exchange, why: str) -> int:
        """Forget what came; the number of the attempt."""
        assert self.submission is not None
        exchange.restart()
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
    left: dict[str, int] = {}
    for name in ("timeout_ms", "first_token_timeout_ms"):
        limit_ms = getattr(submission, name)
        left[name] = max(0, int(limit_ms - passed_s * 1000))
        if limit_ms and not left[name]:
            what = "it did not end" if name == "timeout_ms" else "no token came"
            raise RequestError(
                FailureReason.DEADLINE_EXCEEDED,
                f"the request took too long: {what} within {limit_ms} ms",
            )
    return replace(
        submission,
        timeout_ms=left["timeout_ms"],
        first_token_timeout_ms=left["first_token_timeout_ms"],
    )
