"""Turns of those that wait for one checker: one at a time, tenants alike, small before large.

The tenant whose turns took least time comes next. Of its own the smallest does: each of so many
bytes is as good as a place in the order of coming, so whatever is large is passed by a bounded
number that came later. Where no more may wait, the tenant that has most there gives a place up.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from shared.errors import FailureReason, RequestError
from shared.shares import Shares

# Larger than what people write by hand: those keep the order in which they came.
_BYTES_PER_PLACE: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    tenant_id: str
    place: tuple[int, int]
    """Smaller is earlier, among those of its tenant."""
    told: "asyncio.Future[None]"


class Turns:
    """Waiting in bounded number. One event loop uses it."""

    def __init__(self, max_present: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_present` counts those that wait, and the one whose turn it is."""
        self._max_present = max_present
        self._clock = clock
        self._num_come = 0
        self._is_taken = False
        self._waiting: list[_Waiter] = []
        # Seconds that turns took.
        self._shares = Shares()

    @contextlib.asynccontextmanager
    async def turn(self, tenant_id: str, num_bytes: int) -> AsyncIterator[None]:
        """The turn of one of this size.

        Raises:
            RequestError: Too many wait already.
        """
        self._shares.enter(tenant_id)
        try:
            await self._take(tenant_id, num_bytes)
            started = self._clock()
            try:
                yield
            finally:
                self._shares.charge(tenant_id, self._clock() - started)
                self._hand_over()
        finally:
            self._shares.leave(tenant_id)

    async def _take(self, tenant_id: str, num_bytes: int) -> None:
        self._num_come += 1
        if not self._is_taken:
            self._is_taken = True
            return
        if sum(not waiter.told.done() for waiter in self._waiting) + 1 >= self._max_present:
            self._make_room(tenant_id)
        place = self._num_come + num_bytes // _BYTES_PER_PLACE, self._num_come
        mine = _Waiter(tenant_id, place, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            await mine.told
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            elif not mine.told.cancelled() and mine.told.exception() is None:
                self._hand_over()  # it was told, and went away before it heard
            raise

    def _make_room(self, tenant_id: str) -> None:
        """For one of this tenant, if another has more there even then."""
        there = [waiter for waiter in self._waiting if not waiter.told.done()]
        counts = Counter(waiter.tenant_id for waiter in there)
        largest, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
        if count <= counts[tenant_id] + 1:
            raise self._full()
        theirs = (waiter for waiter in there if waiter.tenant_id == largest)
        last = max(theirs, key=lambda waiter: waiter.place)
        self._waiting.remove(last)
        last.told.set_exception(self._full())

    def _full(self) -> RequestError:
        return RequestError(
            FailureReason.QUEUE_FULL,
            f"{self._max_present} constraints wait to be checked",
            field="constraint",
            retry_after_ms=1000,
        )

    def _hand_over(self) -> None:
        while self._waiting:
            next_one = min(
                self._waiting, key=lambda one: (self._shares.served(one.tenant_id), one.place)
            )
            self._waiting.remove(next_one)
            if not next_one.told.done():
                next_one.told.set_result(None)
                return
        self._is_taken = False
