"""Comparisons prompt by prompt."""

import math

import pytest

from tools.paired import Pairs, pair


def test_prompts_are_counted_by_who_was_right() -> None:
    before = {0: True, 1: True, 2: False, 3: False, 4: True}
    after = {0: True, 1: False, 2: True, 3: False, 4: False}
    assert pair(before, after) == Pairs(both=1, lost=2, won=1, neither=1)


def test_both_must_have_answered_the_same_prompts() -> None:
    with pytest.raises(AssertionError):
        pair({0: True}, {1: True})


def test_points_are_of_a_hundred() -> None:
    pairs = Pairs(both=90, lost=5, won=2, neither=3)
    assert pairs.count == 100
    assert pairs.points == pytest.approx(-3.0)


def test_the_p_value_is_mcnemars_exact_one() -> None:
    # Six changes, all for the worse: 2 * (1/2)^6.
    assert Pairs(both=0, lost=6, won=0, neither=0).p_value() == pytest.approx(2 / 64)
    assert Pairs(both=0, lost=8, won=2, neither=0).p_value() == pytest.approx(
        2 * sum(math.comb(10, k) for k in range(3)) / 2**10
    )


def test_an_even_split_and_no_change_prove_nothing() -> None:
    for lost, won in ((0, 0), (3, 3), (1, 0)):
        assert Pairs(both=9, lost=lost, won=won, neither=0).p_value() == 1.0


def test_the_interval_narrows_with_prompts_and_holds_the_difference() -> None:
    few, many = (Pairs(both=n - 5, lost=4, won=1, neither=0) for n in (100, 10_000))
    for pairs in (few, many):
        low, high = pairs.interval()
        assert low < pairs.points < high
    assert few.interval()[1] - few.interval()[0] > 50 * (many.interval()[1] - many.interval()[0])


def test_an_interval_has_a_width_even_without_any_change() -> None:
    low, high = Pairs(both=1000, lost=0, won=0, neither=0).interval()
    assert low == -high
    assert 0.1 < high < 0.3


def test_a_report_shows_both_scores() -> None:
    shown = Pairs(both=90, lost=5, won=2, neither=3).as_dict()
    assert (shown["before"], shown["after"], shown["points"]) == (0.95, 0.92, -3.0)
    assert (shown["prompts"], shown["lost"], shown["won"]) == (100, 5, 2)
