"""What waits, and how long it will: for clients that are refused, and told when to come back.

Estimates come from measured paces (`pace.py`); where nothing was measured nobody is refused for
being late, and the shortest retry is told.
"""

from dataclasses import dataclass
from typing import Final

from services.scheduler.limits import CoreConfig
from shared.errors import FailureReason, RequestError

# Bounds of the wait that a refused client is told, milliseconds.
MIN_RETRY_MS: Final = 500
MAX_RETRY_MS: Final = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The work of a scheduler that is not done yet.

    `num_catch_up_tokens` are those of running sequences. `sequences_per_s` is None, and
    `prompt_tokens_per_s` 0, when it was not measured.
    """

    num_sequences: int
    num_tokens: int
    num_catch_up_tokens: int
    sequences_per_s: float | None
    prompt_tokens_per_s: float

    def wait_s(self, num_sequences: float, num_tokens: int) -> float:
        """Seconds until so many sequences, with so many tokens, have left the queue.

        The slower of both counts: rows and blocks come back at one pace, prompts are computed at
        the other.
        """
        by_number = by_tokens = 0.0
        if num_sequences and self.sequences_per_s is not None:
            pace = self.sequences_per_s
            by_number = num_sequences / pace if pace else float("inf")
        if self.prompt_tokens_per_s:
            by_tokens = num_tokens / self.prompt_tokens_per_s
        return max(by_number, by_tokens)


def check_room(backlog: Backlog, config: CoreConfig, num_tokens: int) -> None:
    """Raise when so many tokens more would wait behind too many others.

    An empty queue takes any request.
    """
    num_waiting, total = backlog.num_sequences, backlog.num_tokens + num_tokens
    if not num_waiting:
        return
    if num_waiting >= config.max_queued_requests or total > config.max_queued_tokens:
        drained_s = backlog.wait_s(num_waiting, backlog.num_tokens + backlog.num_catch_up_tokens)
        raise RequestError(
            FailureReason.QUEUE_FULL,
            f"{num_waiting} sequences wait, the bounds are {config.max_queued_requests} "
            f"sequences and {config.max_queued_tokens} tokens",
            retry_after_ms=_retry_ms(drained_s),
        )


def check_first_token(
    backlog: Backlog, limit_s: float, num_tokens: int, num_tokens_before: int
) -> None:
    """Raise when the first token surely comes later than `limit_s`, as far as paces are known.

    Args:
        backlog: What there is to do.
        limit_s: What the client allows; 0 is any time.
        num_tokens: Its prompt.
        num_tokens_before: Of waiting sequences that would be computed first.
    """
    if not limit_s:
        return
    own_s = backlog.wait_s(0, num_tokens)
    if own_s > limit_s:
        raise RequestError(
            FailureReason.DEADLINE_EXCEEDED,
            f"{num_tokens} prompt tokens take about {own_s:.1f} s to compute, "
            f"the first token was wanted within {limit_s:g} s",
            field="first_token_timeout_ms",
        )
    share = num_tokens_before / backlog.num_tokens if backlog.num_tokens else 0.0
    tokens = num_tokens_before + backlog.num_catch_up_tokens
    all_s = backlog.wait_s(backlog.num_sequences * share, tokens) + own_s
    if all_s > limit_s:
        raise RequestError(
            FailureReason.QUEUE_FULL,
            f"the first token is about {all_s:.1f} s away, it was wanted within {limit_s:g} s",
            field="first_token_timeout_ms",
            retry_after_ms=_retry_ms(all_s - limit_s),
        )


def _retry_ms(seconds: float) -> int:
    return round(min(max(seconds * 1000, MIN_RETRY_MS), MAX_RETRY_MS))
