"""The queue of sequences that hold nothing, in the order in which they are to run.

Sequences stand in lanes (`policy.py`), each sorted by a key that never changes. The queue counts
sequences and tokens, so that admission can be bounded in both.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

from services.scheduler.limits import CoreConfig
from services.scheduler.policy import Key, LaneName, Policy
from services.scheduler.sequence import Sequence

_NEVER: Final = float("-inf")
_Entry = tuple[Key, int, Sequence]


class _Lane:
    """Sequences of one tenant, or those that ran before."""

    __slots__ = ("entries", "name", "served_at")

    def __init__(self, name: LaneName) -> None:
        """Empty, without a turn yet."""
        self.name = name
        self.entries: list[_Entry] = []
        self.served_at = _NEVER


class WaitingQueue:
    """Ordered set of sequences.

    Args:
        policy: The order; first come, first served if not given.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        """An empty queue."""
        self.policy = Policy(CoreConfig()) if policy is None else policy
        # Tokens, blocks and hits counted for the sequence; a late token of a preempted one may
        # add more.
        self._counted: dict[Sequence, tuple[int, int, int]] = {}
        self._lanes: dict[LaneName, _Lane] = {}
        self.num_tokens = 0
        # Blocks that they take when they start, as far as who added them said.
        self.num_blocks = 0
        # Tokens of them that are computed already, as far as who added them said.
        self.num_hit_tokens = 0
        # Grows with every change.
        self.version = 0

    def __len__(self) -> int:
        return len(self._counted)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._counted)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._counted

    def add(self, sequence: Sequence, now: float, num_blocks: int = 0, num_hits: int = 0) -> None:
        """A sequence waits from now on, for a row and so many blocks; some tokens are computed."""
        sequence.waits_since = now
        self.policy.number(sequence)
        self._counted[sequence] = (sequence.num_tokens, num_blocks, num_hits)
        self.num_tokens += sequence.num_tokens
        self.num_blocks += num_blocks
        self.num_hit_tokens += num_hits
        self.version += 1
        name = self.policy.lane_of(sequence)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(name)
        insort(lane.entries, self._entry(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        num_tokens, num_blocks, num_hits = self._counted.pop(sequence)
        self.num_tokens -= num_tokens
        self.num_blocks -= num_blocks
        self.num_hit_tokens -= num_hits
        self.version += 1
        lane = self._lanes[self.policy.lane_of(sequence)]
        del lane.entries[bisect_left(lane.entries, self._entry(sequence))]
        if not lane.entries:
            del self._lanes[lane.name]

    def take(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out because it is its turn."""
        self._lanes[self.policy.lane_of(sequence)].served_at = now
        self.remove(sequence)

    def candidates(self, now: float, most: int) -> list[Sequence]:
        """The next ones, in order, as if each of them were served in turn."""
        if len(self._lanes) == 1:
            (lane,) = self._lanes.values()
            return [entry[-1] for entry in lane.entries[:most]]
        standing = [self._standing(lane, 0, 0.0, now) for lane in self._lanes.values()]
        heapq.heapify(standing)
        found: list[Sequence] = []
        while standing and len(found) < most:
            _, served, (_, _, sequence), place, lane = standing[0]
            found.append(sequence)
            if place + 1 < len(lane.entries):
                served += 0.0 if lane.name is None else sequence.num_tokens
                heapq.heapreplace(standing, self._standing(lane, place + 1, served, now))
            else:
                heapq.heappop(standing)
        return found

    def head(self, now: float) -> Sequence | None:
        """The sequence that is next."""
        return next(iter(self.candidates(now, 1)), None)

    def tokens_before(self, tenant_id: str, num_tokens: int) -> int:
        """Tokens that a new sequence of a tenant would see computed first, roughly.

        Each other tenant gets as many as this one while it waits, and no more than it asks for.
        """
        own = num_tokens
        mine = self._lanes.get(tenant_id if tenant_id in self._lanes else "")
        if mine is not None:
            own += self._lane_tokens(mine)
        before = own - num_tokens
        for lane in self._lanes.values():
            if lane is not mine:
                tokens = self._lane_tokens(lane)
                before += tokens if lane.name is None else min(tokens, own)
        return before

    def _lane_tokens(self, lane: _Lane) -> int:
        return sum(self._counted[entry[-1]][0] for entry in lane.entries)

    def _entry(self, sequence: Sequence) -> _Entry:
        # The number is unique, so sequences themselves are never compared.
        return (self.policy.key(sequence), sequence.number, sequence)

    def _standing(
        self, lane: _Lane, place: int, served: float, now: float
    ) -> tuple[int, float, _Entry, int, _Lane]:
        """What the lane's entry at `place` is compared by; `served` as the one before left it."""
        entry = lane.entries[place]
        level = self.policy.level(entry[-1], lane.served_at, now)
        return (level, served if place else self.policy.served(lane.name), entry, place, lane)
