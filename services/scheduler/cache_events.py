"""What changed in the prefix caches, for those who keep a picture of them: a numbered, bounded log.

Every change has a number, consecutive from 1 over all replicas. A reader asks for the changes
behind the last number that it knows; when those are no longer kept it needs a snapshot, which says
what is cached at a number, and goes on from there.
"""

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from services.scheduler.holders import Holders

# Changes that are kept: minutes of a busy scheduler.
NUM_KEPT: Final = 16_384


class CacheChange(enum.IntEnum):
    """What happened; the numbers are those of glm.v1.CacheChange."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """One change in the cache of a replica; a cleared cache names no block."""

    number: int
    replica: int
    change: CacheChange
    block_hash: bytes = b""
    parent_hash: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlock:
    """A block that can be hit; `parent_hash` is the root for the first of a chain."""

    replica: int
    block: int
    block_hash: bytes
    parent_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUpdate:
    """What a reader is told: a snapshot as of `number`, or the events up to it."""

    number: int
    snapshot: Sequence[CachedBlock] | None = None
    events: Sequence[CacheEvent] = ()


class CacheLog:
    """The changes of all caches of a scheduler.

    Args:
        read_caches: What is cached now, for snapshots.
        num_kept: Changes that are kept.
        holders: Follows the changes; None where nobody asks which replica holds what.
    """

    def __init__(
        self,
        read_caches: Callable[[], list[CachedBlock]],
        num_kept: int = NUM_KEPT,
        holders: Holders | None = None,
    ) -> None:
        """Nothing has changed."""
        self.number = 0
        self._holders = holders
        self._read_caches = read_caches
        # Replica, change, hash, parent; the last one has `number`.
        self._kept: deque[tuple[int, CacheChange, bytes, bytes]] = deque(maxlen=num_kept)

    def stored(self, replica: int, block_hash: bytes, parent_hash: bytes) -> None:
        """A block can be hit."""
        self.number += 1
        self._kept.append((replica, CacheChange.STORED, block_hash, parent_hash))
        if self._holders is not None:
            self._holders.stored(replica, block_hash)

    def removed(self, replica: int, block_hash: bytes) -> None:
        """A block can be hit no more."""
        self.number += 1
        self._kept.append((replica, CacheChange.REMOVED, block_hash, b""))
        if self._holders is not None:
            self._holders.removed(replica, block_hash)

    def cleared(self, replica: int) -> None:
        """No block of the replica can be hit any more."""
        self.number += 1
        self._kept.append((replica, CacheChange.CLEARED, b"", b""))
        if self._holders is not None:
            self._holders.cleared(replica)

    def read(self, after: int | None) -> CacheUpdate:
        """What a reader who knows everything up to number `after` is to be told next.

        None stands for one who knows nothing; a number that was never given for one who knows
        another scheduler's.
        """
        num_new = -1 if after is None else self.number - after
        if not 0 <= num_new <= len(self._kept):
            return CacheUpdate(number=self.number, snapshot=self._read_caches())
        first = self.number - num_new + 1
        new = islice(self._kept, len(self._kept) - num_new, None)
        events = [
            CacheEvent(
                number=number, replica=replica, change=change, block_hash=name, parent_hash=parent
            )
            for number, (replica, change, name, parent) in enumerate(new, first)
        ]
        return CacheUpdate(number=self.number, events=events)
