"""Requests at once and per minute."""

import pytest

from services.frontend.quota import Quota
from shared.errors import FailureReason, RequestError


def refusal(quota: Quota, now: float) -> RequestError:
    with pytest.raises(RequestError) as caught:
        quota.enter(now)
    assert caught.value.reason is FailureReason.QUEUE_FULL
    return caught.value


def test_without_bounds_everything_enters() -> None:
    quota = Quota()
    for _ in range(1000):
        quota.enter(0)
    assert quota.num_running == 1000


def test_a_place_that_is_given_back_is_free_again() -> None:
    quota = Quota(max_concurrent=2)
    leave = quota.enter(0)
    quota.enter(0)
    assert refusal(quota, 0).retry_after_ms == 1000
    leave()
    quota.enter(0)
    assert quota.num_running == 2


def test_a_minutes_worth_may_come_at_once_and_then_at_the_rate() -> None:
    quota = Quota(per_minute=60)
    for _ in range(60):
        quota.enter(100.0)
    assert refusal(quota, 100.25).retry_after_ms == 750
    quota.enter(101.0)
    refusal(quota, 101.5)
    quota.enter(102.0)


def test_quiet_time_is_worth_a_minute_at_most() -> None:
    quota = Quota(per_minute=2)
    for now in (0, 0, 1000, 1000):
        quota.enter(now)
    assert refusal(quota, 1000).retry_after_ms == 30_000


def test_what_is_refused_for_its_rate_takes_no_place() -> None:
    quota = Quota(max_concurrent=9, per_minute=1)
    quota.enter(0)
    refusal(quota, 0)
    assert quota.num_running == 1
