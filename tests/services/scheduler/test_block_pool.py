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
    with pytest.raises(AssertionError):
        pool.check(blocks[:1])
    with pytest.raises(AssertionError):
        pool.check([*blocks, blocks[0]])


def test_free_blocks_without_a_content_go_first_then_those_given_back_first() -> None:
    lost: list[int] = []
    pool = BlockPool(8, lost.append)
    early, late = pool.allocate(2), pool.allocate(2)
    for block in early + late:
        pool.keep(block)
    pool.release(early)
    pool.release(late)
    assert (pool.num_free, pool.num_idle) == (7, 4)
    assert pool.allocate(3) == [5, 6, 7]
    assert lost == []
    # Of one table the deepest is lost first.
    assert pool.allocate(3) == [early[1], early[0], late[1]]
    assert lost == [early[1], early[0], late[1]]
    assert not pool.is_kept(early[0])


def test_a_kept_block_is_held_by_many_and_free_after_the_last() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.keep(blocks[0])
    pool.hold(blocks)
    pool.hold(blocks)
    pool.check(blocks * 3)
    for _ in range(3):
        assert pool.num_free == 2
        pool.release(blocks)
    assert (pool.num_free, pool.num_idle) == (3, 1)
    assert pool.num_idle_among([*blocks, *pool.allocate(1)]) == 1
    pool.hold(blocks)
    assert pool.num_idle == 0
    with pytest.raises(AssertionError, match="not kept"):
        pool.hold(pool.allocate(1))


def test_a_block_that_is_held_again_is_the_last_to_be_lost() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate(1)[0] for _ in range(3)]
    for block in blocks:
        pool.keep(block)
        pool.release([block])
    pool.hold(blocks[:1])
    pool.release(blocks[:1])
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_a_dropped_block_goes_like_any_other() -> None:
    pool = BlockPool(4)
    idle, held = pool.allocate(1), pool.allocate(1)
    for block in (*idle, *held):
        pool.keep(block)
    pool.release(idle)
    pool.drop([*idle, *held])
    assert (pool.num_free, pool.num_idle) == (2, 0)
    pool.release(held)
    assert (pool.num_free, pool.num_idle) == (3, 0)
    pool.check([])


def test_blocks_come_back_when_their_last_holders_leave() -> None:
    pool = BlockPool(6)
    shared, alone = pool.allocate(1), pool.allocate(2)
    pool.keep(shared[0])
    pool.hold(shared)
    assert pool.num_coming_back(shared + alone) == 2
    assert pool.num_coming_back(shared * 2) == 1
