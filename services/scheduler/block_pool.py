"""Counts KV blocks: which are free, which are handed out. It knows no sequence and no row.

Law: block 0 is scratch and never leaves this room; a block is free or handed out, never both; a
block comes back exactly once.
"""


class BlockPool:
    """The blocks 1..num_blocks-1 of a worker group. The block freed last is handed out first."""

    def __init__(self, num_blocks: int) -> None:
        """Start with every block but the scratch block free."""
        self.num_total = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._is_free = bytearray(b"\x01") * num_blocks
        self._is_free[0] = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has compared `count` with `num_free`."""
        assert 0 < count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        blocks = self._free[-count:]
        del self._free[-count:]
        blocks.reverse()
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Take blocks back, the last of a table first."""
        for block in reversed(blocks):
            assert block > 0, "the scratch block was handed out"
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = 1
            self._free.append(block)

    def check(self, owned: list[int]) -> None:
        """Assert that `owned` and the free blocks are each block once; for tests."""
        assert len(self._free) == sum(self._is_free), "free list and free marks differ"
        everything = sorted(self._free + owned)
        assert everything == list(range(1, self.num_total + 1)), "a block is lost or shared"
