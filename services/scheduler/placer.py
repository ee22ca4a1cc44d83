"""Gives what waits to replicas that have room, in the order of the queue.

Law: a sequence goes where all of it has room, up to its last token; to a replica that drains only
if no other that stands could ever hold it.

A replica asks before each of its plans. What it, and what waits, looked like when nobody could be
placed is remembered, so that a queue that has to wait costs a comparison and no more. What the
replicas hold of a sequence is looked up when one of them has room for it: once, mostly.
"""

from collections.abc import Sequence as ListOf

from services.scheduler.holders import Holders
from services.scheduler.passing import Passing
from services.scheduler.placement import ReplicaWork, choose_replica
from services.scheduler.replica import Replica, blocks_to_start
from services.scheduler.sequence import NOWHERE, Sequence
from services.scheduler.waiting import WaitingQueue
from shared.errors import FailureReason, RequestError

# So many that wait are looked at in a round: the next one, and those that may pass it.
MAX_CANDIDATES = 8


class Placer:
    """The choice of replicas; with a single one there is nothing to choose.

    Args:
        waiting: Sequences that belong to no replica yet.
        replicas: All of them.
        holders: What their prefix caches hold; None where that is not to matter.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        replicas: ListOf[Replica],
        holders: Holders | None = None,
    ) -> None:
        """Nothing was placed."""
        self._holders = holders
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

    def look_anew(self) -> None:
        """Replicas came or went: what waits may have another choice."""
        self._stopped_at = [()] * len(self._replicas)

    def drain(self, number: int, *, is_draining: bool) -> list[Sequence]:
        """Give a replica nothing new, or undo that; returns what never ran there and has to leave.

        Raises:
            RequestError: There is no such replica, or none would be left.
        """
        if number >= len(self._replicas):
            text = f"there is no replica {number}, {len(self._replicas) - 1} is the last"
            raise RequestError(FailureReason.INVALID_ARGUMENT, text, field="replica")
        drained = self._replicas[number]
        others = [replica for replica in self._replicas if replica is not drained]
        if not is_draining:
            drained.is_draining = False
        elif all(replica.is_draining for replica in others):
            text = f"replica {number} is the last that takes requests: drain the scheduler instead"
            raise RequestError(FailureReason.INVALID_ARGUMENT, text, field="replica")
        else:
            drained.is_draining = True
        self.look_anew()
        # One that ran may still get tokens of a plan in flight: it ends there.
        leaving = [s for s in drained.waiting if is_draining and not s.last_step]
        for sequence in leaving:
            drained.waiting.remove(sequence)
        return leaving

    def _state(self, number: int) -> tuple[int, ...]:
        replica = self._replicas[number]
        batch = replica.batch
        if batch is None:
            return (self._waiting.version,)
        # One that is placed has its room already: an idle replica with it is not one without.
        return (
            self._waiting.version,
            len(batch.running),
            len(replica.waiting),
            batch.holdings.num_free_blocks,
        )

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
        able = self._able(sequence, works)
        if not passing.allows(needed) or not any(work and work.has_room(needed) for work in able):
            passing.stop(sequence, needed)
            return False
        hits = self._hit_tokens(sequence)
        number = choose_replica(able, needed, sequence.num_tokens, hits)
        assert number is not None, "a replica had room"
        passing.note(needed)
        self._waiting.take(sequence, now)
        sequence.replica = number
        self._replicas[number].waiting.add(sequence, now, needed, hits[number] if hits else 0)
        works[number] = self._replicas[number].work()
        return True

    def _able(
        self, sequence: Sequence, works: list[ReplicaWork | None]
    ) -> list[ReplicaWork | None]:
        """Work of the replicas that a sequence may go to."""
        most = sequence.total_limit
        fitting = [work if work and most <= work.max_sequence_len else None for work in works]
        taking = [
            None if replica.is_draining else work
            for replica, work in zip(self._replicas, fitting, strict=True)
        ]
        return taking if any(taking) else fitting

    def _hit_tokens(self, sequence: Sequence) -> list[int]:
        """Tokens of a sequence that each replica holds; empty where that does not matter."""
        batch = next((replica.batch for replica in self._replicas if replica.batch), None)
        if self._holders is None or batch is None:
            return []
        names = batch.cache.names_of(sequence)
        hits = self._holders.num_hits(names, len(self._replicas))
        size = batch.limits.block_size
        first = sequence.request.live[0]
        is_sibling = first is not sequence and first.replica != NOWHERE
        if is_sibling and first.prompt_token_ids == sequence.prompt_token_ids:
            # The prompt is computed there, or about to be: its siblings wait for it there.
            own = (len(first.prompt_token_ids) - 1) // size if batch.cache.is_enabled else 0
            hits[first.replica] = max(hits[first.replica], own)
        return [num_blocks * size for num_blocks in hits]
