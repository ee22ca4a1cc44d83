"""Blocks are free or handed out, never both."""

import pytest

from services.scheduler.block_pool import BlockPool


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = BlockPool(8)
    assert pool.num_total == 7
    assert sorted(pool.allocate(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(3) == blocks


def test_more_than_the_free_blocks_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="3 free"):
        BlockPool(4).allocate(4)


def test_a_block_comes_back_once() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


def test_the_scratch_block_cannot_come_back() -> None:
    with pytest.raises(AssertionError, match="scratch"):
        BlockPool(4).release([0])


def test_check_finds_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    pool.check(blocks)
    with pytest.raises(AssertionError, match="lost or shared"):
        pool.check(blocks[:1])
    with pytest.raises(AssertionError, match="lost or shared"):
        pool.check([*blocks, blocks[0]])
