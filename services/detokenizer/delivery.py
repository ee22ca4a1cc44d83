"""Frames of one request on their way to a reader who may be slow.

A stream may send while it has credit: bytes that have left for the client. Without credit nothing
is built; new output merges in the choices, so what is kept grows with the text and not with the
number of steps. A reader who leaves more than `max_pending_bytes` lying, or takes nothing for
`max_stall_s`, loses the request; the shared stream never waits for anyone.
"""

from dataclasses import dataclass, replace

from services.detokenizer.assemble import Presenter
from services.detokenizer.choice import Choice
from services.detokenizer.messages import TextEnd, TextFinished
from services.detokenizer.response import Response
from shared.errors import FailureReason, RequestError

# Rough size of one logprobs entry in JSON; only the order of magnitude matters here.
_ENTRY_BYTES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """How long and how much is kept for a reader who does not read."""

    max_pending_bytes: int = 1 << 18
    max_stall_s: float = 30.0


@dataclass(slots=True)  # not frozen: one is made per token, and freezing doubles its cost
class Output:
    """What a request has to say now: at most one verdict, bytes, at most one end, in this order."""

    has_verdict: bool
    refusal: RequestError | None
    frames: bytes
    end: TextEnd | None


class Delivery:
    """One request, one reader."""

    def __init__(
        self,
        response: Response,
        presenter: Presenter,
        limits: ReaderLimits,
        *,
        is_stream: bool,
        credit_bytes: int,
    ) -> None:
        """Only streams need credit."""
        self.response = response
        self._presenter = presenter
        self._limits = limits
        self._is_stream = is_stream
        self._credit_bytes = credit_bytes
        self._stalled_since: float | None = None
        self._has_told_verdict = False
        self.is_over = False

    def add_credit(self, num_bytes: int) -> bool:
        """The client has taken bytes; whether more can be sent now that could not before."""
        had_none = self._credit_bytes <= 0
        self._credit_bytes += num_bytes
        return had_none and self._credit_bytes > 0

    def take(self, now: float) -> Output:
        """What can be sent now."""
        response = self.response
        if not response.is_admitted and response.refusal is None:
            return Output(has_verdict=False, refusal=None, frames=b"", end=None)
        if response.refusal is not None:
            return self.take_failure()
        frames, is_drained = self._take_frames(now)
        has_verdict, self._has_told_verdict = not self._has_told_verdict, True
        end = response.end
        if end is None or (not is_drained and not isinstance(end, RequestError)):
            return Output(has_verdict, None, frames, None)
        self.is_over = True
        if isinstance(end, TextFinished) and (kept := self._presenter.kept()):
            end = replace(end, object_json=kept)
        return Output(has_verdict, None, frames, end)

    def take_failure(self) -> Output:
        """Verdict and end alone: after a refusal, or when building frames has failed."""
        response, has_verdict = self.response, not self._has_told_verdict
        self.is_over, self._has_told_verdict = True, True
        return Output(has_verdict, response.refusal, b"", response.end)

    def tick(self, now: float) -> None:
        """Look at the clock: deadlines and slow readers."""
        self.response.check_deadline(now)
        if self._stalled_since is not None and not self.is_over:
            check_reader(self.response, self._stalled_since, self._limits, now)

    def _take_frames(self, now: float) -> tuple[bytes, bool]:
        """Frames within the credit, and whether nothing is left behind."""
        if self._is_stream and self._credit_bytes <= 0:
            has_news = self.response.end is not None or any(map(_has_news, self.response.choices))
            if has_news and self._stalled_since is None:
                self._stalled_since = now
            for choice in self.response.choices:
                choice.text.delta.compact()
            return b"", not has_news
        self._stalled_since = None
        frames = self._presenter.render(self.response.choices)
        self._credit_bytes -= len(frames)
        return frames, True


def check_reader(
    response: Response, stalled_since: float, limits: ReaderLimits, now: float
) -> None:
    """End a request whose reader has left too much lying, or for too long."""
    stalled_s = now - stalled_since
    pending = sum(map(_pending_bytes, response.choices))
    if stalled_s < limits.max_stall_s and pending <= limits.max_pending_bytes:
        return
    message = f"the reader left {pending} bytes lying, the oldest for {stalled_s:.1f} s"
    response.give_up(RequestError(FailureReason.SLOW_READER, message))


def _has_news(choice: Choice) -> bool:
    return bool(choice.text.delta or choice.logprobs or choice.token_ids)


def _pending_bytes(choice: Choice) -> int:
    """Rough size of what a choice has not shown yet."""
    extras = len(choice.logprobs) * _ENTRY_BYTES + 8 * len(choice.token_ids)
    return choice.text.delta.num_chars + extras
