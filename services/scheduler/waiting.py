"""The queue of sequences that hold nothing: first come, first served; the preempted come first.

It counts sequences and tokens, so that admission can be bounded in both.
"""

from collections import OrderedDict
from collections.abc import Iterator

from services.scheduler.sequence import Sequence


class WaitingQueue:
    """Ordered set of sequences; every operation is O(1)."""

    def __init__(self) -> None:
        """An empty queue."""
        # Value: the tokens counted for the sequence; a late token of a preempted one may add more.
        self._tokens: OrderedDict[Sequence, int] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._tokens)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._tokens

    @property
    def head(self) -> Sequence | None:
        """The sequence that is next."""
        return next(iter(self._tokens), None)

    def append(self, sequence: Sequence) -> None:
        """Last in line."""
        self._tokens[sequence] = sequence.num_tokens
        self.num_tokens += sequence.num_tokens

    def push_front(self, sequence: Sequence) -> None:
        """First in line: it ran before."""
        self.append(sequence)
        self._tokens.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        self.num_tokens -= self._tokens.pop(sequence)
