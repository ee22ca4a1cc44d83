"""Turns of those that wait for one checker: one at a time, small ones before large ones.

Each of so many bytes is as good as a place in the order of coming, so whatever is large is passed
by a bounded number that came later.
"""

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator
from typing import Final

from shared.errors import FailureReason, RequestError

# Larger than what people write by hand: those keep the order in which they came.
_BYTES_PER_PLACE: Final = 4096


class Turns:
    """Waiting in bounded number. One event loop uses it."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_present = 0
        self._num_come = 0
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """The turn of one of this size.

        Raises:
            RequestError: Too many wait already.
        """
        if self._num_present >= self._max_waiting:
            raise RequestError(
                FailureReason.QUEUE_FULL,
                f"{self._num_present} constraints wait to be checked",
                field="constraint",
                retry_after_ms=1000,
            )
        self._num_present += 1
        try:
            await self._take(num_bytes)
            try:
                yield
            finally:
                self._hand_over()
        finally:
            self._num_present -= 1

    async def _take(self, num_bytes: int) -> None:
        self._num_come += 1
        if not self._is_taken:
            self._is_taken = True
            return
        place = self._num_come + num_bytes // _BYTES_PER_PLACE
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (place, self._num_come, mine))
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self._hand_over()  # it was told, and went away before it heard
            raise

    def _hand_over(self) -> None:
        while self._waiting:
            *_, next_one = heapq.heappop(self._waiting)
            if not next_one.done():
                next_one.set_result(None)
                return
        self._is_taken = False
