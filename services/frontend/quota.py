"""What one API key may ask for: requests at once, and requests per minute.

Plain counting; the time comes as an argument. The rate is a bucket: a key that was quiet may
ask for a minute's worth at once.
"""

import math
from collections.abc import Callable

from shared.errors import FailureReason, RequestError


class Quota:
    """The counts of one key.

    Args:
        max_concurrent: Most requests in work; None is no bound.
        per_minute: Most requests per minute; None is no bound.
    """

    def __init__(self, max_concurrent: int | None = None, per_minute: int | None = None) -> None:
        """Start quiet."""
        self._max_concurrent = max_concurrent
        self._per_minute = per_minute
        self._num_left = float(per_minute or 0)
        self._seen_at: float | None = None
        self.num_running = 0

    def enter(self, now: float) -> Callable[[], None]:
        """Take a request; returns what gives its place back, to be called once.

        Raises:
            RequestError: QUEUE_FULL, with the time after which it is worth to come back.
        """
        if self._max_concurrent is not None and self.num_running >= self._max_concurrent:
            raise _full(f"this API key has {self.num_running} requests in work already", 1000)
        self._take_one(now)
        self.num_running += 1
        return self._leave

    def _leave(self) -> None:
        self.num_running -= 1

    def _take_one(self, now: float) -> None:
        if self._per_minute is None:
            return
        quiet_s = 0.0 if self._seen_at is None else max(0.0, now - self._seen_at)
        self._seen_at = now
        self._num_left = min(self._per_minute, self._num_left + quiet_s * self._per_minute / 60)
        if self._num_left < 1:
            wait_s = (1 - self._num_left) * 60 / self._per_minute
            text = f"this API key may ask {self._per_minute} times a minute"
            raise _full(text, math.ceil(wait_s * 1000))
        self._num_left -= 1


def _full(message: str, retry_after_ms: int) -> RequestError:
    return RequestError(FailureReason.QUEUE_FULL, message, retry_after_ms=retry_after_ms)
