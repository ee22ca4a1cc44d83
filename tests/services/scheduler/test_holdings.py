"""Rows and blocks come back when no plan in flight can touch them."""

import pytest

from services.scheduler.holdings import Holdings
from services.scheduler.sequence import Sequence
from tests.services.scheduler.builders import limits, sequence


def hold(holdings: Holdings, num_blocks: int) -> Sequence:
    held = sequence()
    held.row = holdings.take_row()
    holdings.take_blocks(held, num_blocks)
    return held


def test_blocks_of_an_idle_sequence_are_free_at_once() -> None:
    holdings = Holdings(limits())
    held = hold(holdings, 3)
    held.last_step = 1
    holdings.settle(1)
    holdings.release(held)
    assert holdings.num_free_blocks == holdings.num_total_blocks
    assert not held.blocks


def test_blocks_named_by_a_plan_in_flight_wait_for_its_result() -> None:
    holdings = Holdings(limits())
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
    holdings = Holdings(limits(num_rows=2))
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
    holdings = Holdings(limits())
    held, thief = hold(holdings, 1), sequence()
    thief.row = held.row
    holdings.check([held])
    with pytest.raises(AssertionError, match="row is lost or shared"):
        holdings.check([held, thief])
