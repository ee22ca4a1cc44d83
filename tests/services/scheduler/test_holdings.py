"""Rows and blocks come back when no plan in flight can touch them."""

import pytest

from services.scheduler.block_pool import BlockPool
from services.scheduler.holdings import Holdings
from services.scheduler.sequence import Sequence
from tests.services.scheduler.builders import limits, sequence


def make(**changes: int) -> Holdings:
    bounds = limits(**changes)
    return Holdings(bounds, BlockPool(bounds.num_blocks))


def hold(holdings: Holdings, num_blocks: int) -> Sequence:
    held = sequence()
    held.row = holdings.take_row()
    holdings.take_blocks(held, num_blocks)
    return held


def test_blocks_of_an_idle_sequence_are_free_at_once() -> None:
    holdings = make()
    held = hold(holdings, 3)
    held.last_step = 1
    holdings.settle(1)
    holdings.release(held)
    assert holdings.num_free_blocks == holdings.num_total_blocks
    assert not held.blocks


def test_blocks_named_by_a_plan_in_flight_wait_for_its_result() -> None:
    holdings = make()
    held = hold(holdings, 3)
    held.last_step = 2
    holdings.settle(1)
    holdings.release(held)
    assert (holdings.num_free_blocks, holdings.num_deferred) == (13, 3)
    holdings.check([])
    holdings.settle(2)
    assert (holdings.num_free_blocks, holdings.num_deferred) == (16, 0)
    holdings.check([])


def test_a_row_returns_after_the_result_of_the_plan_that_announced_it() -> None:
    holdings = make(num_rows=2)
    first, second = hold(holdings, 1), hold(holdings, 1)
    assert not holdings.has_free_row
    row = first.row
    holdings.release(first)
    assert not holdings.has_free_row
    assert holdings.announce(1) == [row]
    assert holdings.announce(2) == []
    assert not holdings.has_free_row
    holdings.settle(1)
    assert holdings.take_row() == row
    first.row = row
    holdings.check([first, second])


def test_check_finds_a_row_with_two_owners() -> None:
    holdings = make()
    held, thief = hold(holdings, 1), sequence()
    thief.row = held.row
    holdings.check([held])
    with pytest.raises(AssertionError, match="row is lost or shared"):
        holdings.check([held, thief])


def test_only_blocks_that_nobody_else_holds_come_back() -> None:
    bounds = limits()
    pool = BlockPool(bounds.num_blocks)
    holdings = Holdings(bounds, pool)
    first = hold(holdings, 3)
    for block in first.blocks[:2]:
        pool.keep(block)
    second = sequence()
    second.row = holdings.take_row()
    holdings.share_blocks(second, first.blocks[:2])
    holdings.take_blocks(second, 1)
    assert holdings.num_coming_back([first]) == 1
    assert holdings.num_coming_back([first, second]) == 4
    # One of them has left already, but a plan in flight names it.
    second.last_step = 1
    holdings.release(second)
    assert holdings.num_coming_back([]) == 1
    assert holdings.num_coming_back([first]) == 4
    holdings.check([first])


def test_idle_blocks_that_are_held_again_count_as_taken() -> None:
    bounds = limits()
    pool = BlockPool(bounds.num_blocks)
    holdings = Holdings(bounds, pool)
    held = hold(holdings, 3)
    blocks = list(held.blocks)
    for block in blocks:
        pool.keep(block)
    assert holdings.num_taken_by(blocks[:2], 1) == 1
    holdings.release(held)
    assert holdings.num_taken_by(blocks[:2], 1) == 3
