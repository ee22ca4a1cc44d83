"""What one API key may ask for: requests at once, and requests per minute.

Plain counting; the clock comes as an argument. The rate is a bucket: a key that was quiet may
ask for a minute's worth at once. `Quota` counts for one process, `shared_quota` for several.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.errors import FailureReason, RequestError

Leave = Callable[[], None]
# Monotonic seconds. It is read when the counts are ours, for which a request may have to wait.
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBounds:
    """Most requests of a key in work, and most per minute; None is no bound."""

    max_concurrent: int | None = None
    per_minute: int | None = None

    def check_running(self, num_running: int) -> None:
        """QUEUE_FULL when one more would be too many."""
        if self.max_concurrent is not None and num_running >= self.max_concurrent:
            raise _full(f"this API key has {num_running} requests in work already", 1000)

    def refilled(self, num_left: float, quiet_s: float) -> float:
        """What may be asked for at once, after so much time without a request."""
        if self.per_minute is None:
            return 0.0
        return min(float(self.per_minute), num_left + max(0.0, quiet_s) * self.per_minute / 60)

    def check_rate(self, num_left: float) -> None:
        """QUEUE_FULL, with the time after which it is worth to come back, when none is left."""
        if self.per_minute is not None and num_left < 1:
            wait_s = (1 - num_left) * 60 / self.per_minute
            text = f"this API key may ask {self.per_minute} times a minute"
            raise _full(text, math.ceil(wait_s * 1000))


class KeyQuota(Protocol):
    """Who counts the requests of one key."""

    async def enter(self, clock: Clock) -> Leave:
        """Take a request; returns what gives its place back, to be called once.

        Raises:
            RequestError: QUEUE_FULL, with the time after which it is worth to come back.
        """


class Quota:
    """The counts of one key in this process."""

    def __init__(self, bounds: KeyBounds | None = None) -> None:
        """Start quiet."""
        self._bounds = bounds or KeyBounds()
        self._num_left = float(self._bounds.per_minute or 0)
        self._seen_at: float | None = None
        self.num_running = 0

    async def enter(self, clock: Clock) -> Leave:
        """Take a request."""
        now = clock()
        self._bounds.check_running(self.num_running)
        quiet_s = 0.0 if self._seen_at is None else now - self._seen_at
        self._seen_at = now
        self._num_left = self._bounds.refilled(self._num_left, quiet_s)
        self._bounds.check_rate(self._num_left)
        self._num_left -= 1
        self.num_running += 1
        return self._leave

    def _leave(self) -> None:
        self.num_running -= 1


def _full(message: str, retry_after_ms: int) -> RequestError:
    return RequestError(FailureReason.QUEUE_FULL, message, retry_after_ms=retry_after_ms)
