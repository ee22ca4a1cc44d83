"""Which replicas hold which blocks: how much of a sequence each of them has computed already.

The caches' log tells every change (`cache_events.py`). A name maps to the replicas that hold it, as
bits of a number, so that one walk along a sequence's names finds the hits of all replicas: it costs
a look-up per block of the longest one, however many replicas there are.
"""

from collections.abc import Iterable
from itertools import takewhile


class Holders:
    """Replicas by the names of the blocks that can be found there."""

    def __init__(self) -> None:
        """Nothing is cached anywhere."""
        self._holders: dict[bytes, int] = {}
        # Replicas whose cache was cleared since the last look: all names go in one sweep.
        self._cleared = 0

    def stored(self, replica: int, block_hash: bytes) -> None:
        """A block can be found at a replica."""
        self._sweep()
        self._holders[block_hash] = self._holders.get(block_hash, 0) | 1 << replica

    def removed(self, replica: int, block_hash: bytes) -> None:
        """A block can be found there no more."""
        left = self._holders.get(block_hash, 0) & ~(1 << replica)
        if left:
            self._holders[block_hash] = left
        else:
            self._holders.pop(block_hash, None)

    def cleared(self, replica: int) -> None:
        """No block can be found there."""
        self._cleared |= 1 << replica

    def num_hits(self, names: Iterable[bytes], num_replicas: int) -> list[int]:
        """Blocks of the start of a text that each replica holds.

        Args:
            names: Of the text's blocks, in order; read as far as anybody holds them.
            num_replicas: Length of the answer.
        """
        self._sweep()
        hits = [0] * num_replicas
        holding = -1
        index = 0
        for index, holders in enumerate(takewhile(bool, map(self._holder_bits, names)), 1):
            self._note(hits, holding & ~holders, index - 1)
            holding &= holders
            if not holding:
                return hits
        self._note(hits, holding, index)
        return hits

    def __len__(self) -> int:
        """Names that somebody holds."""
        self._sweep()
        return len(self._holders)

    def _holder_bits(self, name: bytes) -> int:
        return self._holders.get(name, 0)

    @staticmethod
    def _note(hits: list[int], replicas: int, count: int) -> None:
        """The hits of these replicas end here."""
        if count and replicas:
            for replica in range(len(hits)):
                if replicas >> replica & 1:
                    hits[replica] = count

    def _sweep(self) -> None:
        if self._cleared:
            kept, self._cleared = ~self._cleared, 0
            swept = ((name, bits & kept) for name, bits in self._holders.items())
            self._holders = {name: bits for name, bits in swept if bits}
