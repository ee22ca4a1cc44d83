"""How many requests are in work, and when no more are taken. Plain counting.

A request that finds the gateway full is refused at once, before its body is read; a queue in front
of the scheduler's own queue would only hide the load from the client.
"""

import asyncio
from collections.abc import Callable

from shared.errors import FailureReason, RequestError


class Admission:
    """Counts requests in work."""

    def __init__(self, max_concurrent: int) -> None:
        """Open, empty."""
        self._max_concurrent = max_concurrent
        self.num_running = 0
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Callable[[], None]:
        """Take a request; the caller calls what it gets back exactly once at its end."""
        if self.is_draining:
            raise RequestError(
                FailureReason.DRAINING, "the server is shutting down", retry_after_ms=1000
            )
        if self.num_running >= self._max_concurrent:
            raise RequestError(
                FailureReason.QUEUE_FULL,
                f"the server works on {self._max_concurrent} requests already",
                retry_after_ms=1000,
            )
        self.num_running += 1
        self._idle.clear()
        return self._leave

    def drain(self) -> None:
        """Take no more; idempotent."""
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Until no request is in work."""
        await self._idle.wait()

    def _leave(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()
