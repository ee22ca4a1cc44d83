"""When live sequences have to be over, or to have their first token. Time comes as an argument.

A heap with lazy removal: entries of ended sequences are thrown away when they outnumber the live
ones, so that long time limits do not keep dead sequences in memory.
"""

import heapq

from services.scheduler.sequence import Sequence, SequenceState

# Below this size a heap is not worth rebuilding.
SMALL_HEAP = 64


class Deadlines:
    """Live sequences by the times at which something must have come."""

    def __init__(self) -> None:
        """No deadlines."""
        # Time, order, sequence, whether its first token is enough.
        self._heap: list[tuple[float, int, Sequence, bool]] = []
        self._num_added = 0
        self._num_live = 0

    def add(self, sequence: Sequence, at: float) -> None:
        """A sequence came to life; at that time it must be over."""
        self._num_live += 1
        self._push(sequence, at, is_first=False)

    def add_first_token(self, sequence: Sequence, at: float) -> None:
        """At that time a sequence must have its first token."""
        self._push(sequence, at, is_first=True)

    def ended(self) -> None:
        """One of the sequences ended."""
        self._num_live -= 1
        if len(self._heap) > SMALL_HEAP + 3 * self._num_live:
            self._heap = [entry for entry in self._heap if _is_due(entry)]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[tuple[Sequence, bool]]:
        """Live sequences whose time is over, each once, and whether only a first token is late."""
        over: dict[Sequence, bool] = {}
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if _is_due(entry):
                over.setdefault(entry[2], entry[3])
        return list(over.items())

    def __len__(self) -> int:
        return len(self._heap)

    def _push(self, sequence: Sequence, at: float, *, is_first: bool) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (at, self._num_added, sequence, is_first))


def _is_due(entry: tuple[float, int, Sequence, bool]) -> bool:
    """Whether what the entry asks for has not come yet."""
    _, _, sequence, is_first = entry
    if sequence.state is SequenceState.ENDED:
        return False
    return not (is_first and sequence.first_token_at is not None)
