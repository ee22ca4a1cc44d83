"""Messages on their way to one reader: bounded, and the scheduler never waits for it.

A reader that does not take a message for `stall_s`, or lets more than `max_bytes` gather, is cut:
`write_all` raises SLOW_READER and the owner ends its sequences. gRPC itself accepts a few megabytes
before a write waits, so both bounds count from there on.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shared.errors import FailureReason, RequestError


class Sized(Protocol):
    """A message that knows its encoded size."""

    def ByteSize(self) -> int:  # protobuf's name
        """Bytes on the wire."""
        ...


MessageT = TypeVar("MessageT", bound=Sized)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """How slow a reader may be."""

    max_bytes: int = 16 << 20
    stall_s: float = 2.0


class Outbox(Generic[MessageT]):
    """A queue with one writer task."""

    def __init__(self, limits: OutboxLimits) -> None:
        """Empty and open."""
        self._limits = limits
        self._messages: deque[tuple[MessageT, int]] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._is_over_full = False
        self._is_complete = False
        self._writing: asyncio.Timeout | None = None

    def put(self, message: MessageT) -> None:
        """Queue a message; past the bound the writer ends with SLOW_READER."""
        if self._is_over_full or self._is_complete:
            return
        size = message.ByteSize()
        if self._messages and self._num_bytes + size > self._limits.max_bytes:
            self._is_over_full = True
            self._messages.clear()
            # A write that gets nowhere need not be waited for.
            if self._writing is not None and not self._writing.expired():
                self._writing.reschedule(asyncio.get_running_loop().time())
        else:
            self._messages.append((message, size))
            self._num_bytes += size
        self._changed.set()

    def complete(self) -> None:
        """No message follows: the writer returns when all are written."""
        self._is_complete = True
        self._changed.set()

    async def write_all(self, write: Callable[[MessageT], Awaitable[None]]) -> None:
        """Write until complete; RequestError SLOW_READER when the reader is too slow."""
        while True:
            while self._messages:
                message, size = self._messages[0]
                try:
                    async with asyncio.timeout(self._limits.stall_s) as self._writing:
                        await write(message)
                except TimeoutError:
                    if not self._is_over_full:
                        raise self._slow(f"took nothing for {self._limits.stall_s:g} s") from None
                finally:
                    self._writing = None
                if self._is_over_full:
                    break
                self._messages.popleft()
                self._num_bytes -= size
            if self._is_over_full:
                raise self._slow(f"left over {self._limits.max_bytes} bytes unread")
            if self._is_complete:
                return
            self._changed.clear()
            await self._changed.wait()

    def _slow(self, what: str) -> RequestError:
        return RequestError(FailureReason.SLOW_READER, f"the reader {what}")
