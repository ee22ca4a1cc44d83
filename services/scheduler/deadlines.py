"""When live sequences have to be over. Time comes as an argument.

A heap with lazy removal: entries of ended sequences are thrown away when they outnumber the live
ones, so that long time limits do not keep dead sequences in memory.
"""

import heapq

from services.scheduler.sequence import Sequence, SequenceState

# Below this size a heap is not worth rebuilding.
SMALL_HEAP = 64


class Deadlines:
    """Live sequences by the time at which they must be over."""

    def __init__(self) -> None:
        """No deadlines."""
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_added = 0
        self._num_live = 0

    def add(self, sequence: Sequence, at: float) -> None:
        """A sequence came to life."""
        self._num_live += 1
        self._num_added += 1
        heapq.heappush(self._heap, (at, self._num_added, sequence))

    def ended(self) -> None:
        """One of the sequences ended."""
        self._num_live -= 1
        if len(self._heap) > SMALL_HEAP + 2 * self._num_live:
            self._heap = [entry for entry in self._heap if _is_live(entry[2])]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[Sequence]:
        """Live sequences whose time is over; each is told once."""
        over = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if _is_live(sequence):
                over.append(sequence)
        return over

    def __len__(self) -> int:
        return len(self._heap)


def _is_live(sequence: Sequence) -> bool:
    return sequence.state is not SequenceState.ENDED
