"""Counts KV blocks: which are free, which are held and how often. It knows no sequence and no row.

A block that holds a known content is *kept*: when nobody holds it any more it stays what it is for
as long as there are other free blocks, and can be held again. The kept block that was given back
first is lost first; of one table the last block is given back first.

Laws
- Block 0 is scratch and never leaves this room.
- A block is free or held, never both; each holder gives it back exactly once.
- A block is handed out to one holder; only kept blocks get further ones.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """The blocks 1..num_blocks-1 of a worker group. The block freed last is handed out first.

    Args:
        num_blocks: Blocks that exist, block 0 included.
        on_lost: Told each kept block that is handed out for another content, and kept no more.
    """

    def __init__(self, num_blocks: int, on_lost: Callable[[int], None] | None = None) -> None:
        """Start with every block but the scratch block free, and none kept."""
        self.num_total = num_blocks - 1
        self._on_lost = on_lost
        self._free = list(range(num_blocks - 1, 0, -1))
        # Free blocks that are kept, the next one to be lost first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._is_kept = bytearray(num_blocks)
        self._holders = array("I", bytes(4 * num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Free blocks that are kept."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has compared `count` with `num_free`."""
        free, holders = self._free, self._holders
        assert count > 0, "no block asked"
        if count <= len(free):
            blocks = free[-count:]
            del free[-count:]
            blocks.reverse()
        else:
            blocks = self._take_all(count)
        for block in blocks:
            holders[block] = 1
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Give kept blocks one further holder."""
        for block in blocks:
            assert self._is_kept[block], f"block {block} is not kept"
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder gives blocks back, the last of a table first."""
        for block in reversed(blocks):
            assert block > 0, "the scratch block was handed out"
            count = self._holders[block]
            assert count, f"block {block} freed twice"
            self._holders[block] = count - 1
            if count == 1:
                if self._is_kept[block]:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """A held block has a content that others may want."""
        assert self._holders[block], f"block {block} is free"
        self._is_kept[block] = 1

    def drop(self, blocks: Sequence[int]) -> None:
        """The contents of kept blocks are wanted no more."""
        for block in blocks:
            self._is_kept[block] = 0
            if not self._holders[block]:
                del self._idle[block]
                self._free.append(block)

    def is_kept(self, block: int) -> bool:
        """Whether the block has a content that others may want."""
        return bool(self._is_kept[block])

    def num_idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks would leave the free ones if they were held."""
        holders = self._holders
        return sum(not holders[block] for block in blocks)

    def num_coming_back(self, released: Sequence[int]) -> int:
        """Blocks that become free when each entry of `released` gives back one hold."""
        holders = self._holders
        return sum(holders[block] == count for block, count in Counter(released).items())

    def check(self, held: Sequence[int]) -> None:
        """Assert that `held`, an entry for each hold, and the free blocks are all; for tests."""
        counts = Counter(held)
        assert all(self._holders[block] == counts[block] for block in range(self.num_total + 1))
        assert all(self._is_kept[block] for block in self._idle), "an idle block is not kept"
        assert not any(self._is_kept[block] for block in self._free), "a kept block among the free"
        everything = sorted([*self._free, *self._idle, *counts])
        assert everything == list(range(1, self.num_total + 1)), "a block is lost or held and free"

    def _take_all(self, count: int) -> list[int]:
        """All blocks without a content, and as many others as are missing."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        blocks = self._free[::-1]
        self._free.clear()
        # Lost ones come last, so that they are those deepest in the new table.
        blocks += [self._lose() for _ in range(count - len(blocks))]
        return blocks

    def _lose(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._is_kept[block] = 0
        if self._on_lost is not None:
            self._on_lost(block)
        return block
