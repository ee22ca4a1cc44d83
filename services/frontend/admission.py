"""How much is in work, and when no more is taken. Plain counting.

A request that finds the gateway full is refused at once, before its body is read; a queue in front
of the scheduler's own queue would only hide the load from the client. Bodies are counted in bytes
as well, from their arrival until the request has been handed on: many large ones at once must not
take the memory that all requests live in.
"""

import asyncio

from shared.errors import FailureReason, RequestError


class Admission:
    """Counts requests in work, and bytes of bodies on their way through.

    Args:
        max_concurrent: Most requests.
        max_held_bytes: Most bytes of bodies over all requests.
    """

    def __init__(self, max_concurrent: int, max_held_bytes: int) -> None:
        """Open, empty."""
        self._max_concurrent = max_concurrent
        self._max_held_bytes = max_held_bytes
        self.num_running = 0
        self.num_held_bytes = 0
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> "Place":
        """Take a request; the caller leaves the place at its end."""
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
        return Place(self)

    def drain(self) -> None:
        """Take no more; idempotent."""
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Until no request is in work."""
        await self._idle.wait()

    def hold(self, num_bytes: int) -> None:
        """Count bytes of a body; refuses those that do not fit."""
        if self.num_held_bytes + num_bytes > self._max_held_bytes:
            raise RequestError(
                FailureReason.QUEUE_FULL,
                "the server holds too many large requests already",
                retry_after_ms=1000,
            )
        self.num_held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Bytes of a body are gone."""
        self.num_held_bytes -= num_bytes

    def leave(self) -> None:
        """A request is gone."""
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()


class Place:
    """What one request has taken."""

    __slots__ = ("_admission", "_is_left", "_num_held_bytes")

    def __init__(self, admission: Admission) -> None:
        """Hold nothing yet."""
        self._admission = admission
        self._num_held_bytes = 0
        self._is_left = False

    def hold(self, num_bytes: int) -> None:
        """Count bytes of the body; raises when there is no room."""
        self._admission.hold(num_bytes)
        self._num_held_bytes += num_bytes

    def release_body(self) -> None:
        """The body is not needed any more."""
        self._admission.release(self._num_held_bytes)
        self._num_held_bytes = 0

    def leave(self) -> None:
        """The end of the request; idempotent."""
        self.release_body()
        if not self._is_left:
            self._is_left = True
            self._admission.leave()
