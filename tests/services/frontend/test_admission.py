"""Counting what is in work."""

import asyncio

import pytest

from services.frontend.admission import Admission
from shared.errors import FailureReason, RequestError


def test_past_the_limit_a_request_is_refused_until_one_leaves() -> None:
    admission = Admission(1, 10)
    place = admission.enter()
    with pytest.raises(RequestError) as caught:
        admission.enter()
    assert caught.value.reason is FailureReason.QUEUE_FULL
    assert caught.value.retry_after_ms
    place.leave()
    place.leave()
    admission.enter()
    assert admission.num_running == 1


def test_draining_refuses_all_new_requests() -> None:
    admission = Admission(9, 10)
    admission.drain()
    with pytest.raises(RequestError) as caught:
        admission.enter()
    assert caught.value.reason is FailureReason.DRAINING


def test_bytes_of_bodies_are_bounded_over_all_requests() -> None:
    admission = Admission(9, 10)
    first, second = admission.enter(), admission.enter()
    first.hold(4)
    first.hold(4)
    with pytest.raises(RequestError) as caught:
        second.hold(3)
    assert caught.value.reason is FailureReason.QUEUE_FULL
    second.hold(2)
    first.release_body()
    first.leave()
    assert admission.num_held_bytes == 2
    second.leave()
    assert (admission.num_held_bytes, admission.num_running) == (0, 0)


async def test_idle_means_that_the_last_request_has_left() -> None:
    admission = Admission(9, 10)
    await admission.wait_until_idle()
    place = admission.enter()
    waiting = asyncio.create_task(admission.wait_until_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    place.leave()
    await waiting
