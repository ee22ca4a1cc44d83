"""Gives what waits to replicas that have room, in the order of the queue.

A replica asks before each of its plans. What it, and what waits, looked like when nobody could be
placed is remembered, so that a queue that has to wait costs a comparison and no more.
"""

from collections.abc import Sequence as ListOf

from services.scheduler.passing import Passing
from services.scheduler.placement import ReplicaWork, choose_replica
from services.scheduler.replica import Replica, blocks_to_start
from services.scheduler.sequence import Sequence
from services.scheduler.waiting import WaitingQueue

# So many that wait are looked at in a round: the next one, and those that may pass it.
MAX_CANDIDATES = 8


class Placer:
    """The choice of replicas; with a single one there is nothing to choose.

    Args:
        waiting: Sequences that belong to no replica yet.
        replicas: All of them.
    """

    def __init__(self, waiting: WaitingQueue, replicas: ListOf[Replica]) -> None:
        """Nothing was placed."""
        self._waiting = waiting
        self._replicas = replicas
        # What each replica, and the queue, was like when the last round placed nobody.
        self._stopped_at: list[tuple[int, ...]] = [()] * len(replicas)

    def place(self, asking: int, now: float) -> None:
        """Place as many as there is room for; `asking` is the replica that will plan."""
        if not len(self._waiting) or self._state(asking) == self._stopped_at[asking]:
            return
        works = [replica.work() for replica in self._replicas]
        while self._round(works, now):
            pass
        self._stopped_at = [self._state(number) for number in range(len(self._replicas))]

    def _state(self, number: int) -> tuple[int, ...]:
        batch = self._replicas[number].batch
        if batch is None:
            return (self._waiting.version,)
        holdings = batch.holdings
        return (self._waiting.version, len(batch.running), holdings.num_free_blocks)

    def _round(self, works: list[ReplicaWork | None], now: float) -> bool:
        """One walk along the queue; whether somebody was placed."""
        passing, has_placed = Passing(), False
        for sequence in self._waiting.candidates(now, MAX_CANDIDATES):
            has_placed |= self._place_one(sequence, works, passing, now)
        return has_placed

    def _place_one(
        self, sequence: Sequence, works: list[ReplicaWork | None], passing: Passing, now: float
    ) -> bool:
        limits = next((r.limits for r in self._replicas if r.batch and r.limits), None)
        if limits is None:
            return False
        needed = blocks_to_start(sequence, limits)
        number = choose_replica(works, needed) if passing.allows(needed) else None
        if number is None:
            passing.stop(sequence, needed)
            return False
        passing.note(needed)
        self._waiting.take(sequence, now)
        sequence.replica = number
        self._replicas[number].waiting.add(sequence, now, needed)
        works[number] = self._replicas[number].work()
        return True
