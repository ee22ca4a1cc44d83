"""Requests at once and per minute."""

import pytest

from services.frontend.quota import KeyBounds, Quota
from shared.errors import FailureReason, RequestError
from tests.services.frontend.clocks import at


async def refusal(quota: Quota, now: float) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await quota.enter(at(now))
    assert caught.value.reason is FailureReason.QUEUE_FULL
    return caught.value


async def test_without_bounds_everything_enters() -> None:
    quota = Quota()
    for _ in range(1000):
        await quota.enter(at(0))
    assert quota.num_running == 1000


async def test_a_place_that_is_given_back_is_free_again() -> None:
    quota = Quota(KeyBounds(max_concurrent=2))
    leave = await quota.enter(at(0))
    await quota.enter(at(0))
    assert (await refusal(quota, 0)).retry_after_ms == 1000
    leave()
    await quota.enter(at(0))
    assert quota.num_running == 2


async def test_a_minutes_worth_may_come_at_once_and_then_at_the_rate() -> None:
    quota = Quota(KeyBounds(per_minute=60))
    for _ in range(60):
        await quota.enter(at(100.0))
    assert (await refusal(quota, 100.25)).retry_after_ms == 750
    await quota.enter(at(101.0))
    await refusal(quota, 101.5)
    await quota.enter(at(102.0))


async def test_quiet_time_is_worth_a_minute_at_most() -> None:
    quota = Quota(KeyBounds(per_minute=2))
    for now in (0, 0, 1000, 1000):
        await quota.enter(at(now))
    assert (await refusal(quota, 1000)).retry_after_ms == 30_000


async def test_what_is_refused_for_its_rate_takes_no_place() -> None:
    quota = Quota(KeyBounds(max_concurrent=9, per_minute=1))
    await quota.enter(at(0))
    await refusal(quota, 0)
    assert quota.num_running == 1
