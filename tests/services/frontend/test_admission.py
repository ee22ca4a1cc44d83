"""Counting requests in work."""

import asyncio

import pytest

from services.frontend.admission import Admission
from shared.errors import FailureReason, RequestError


def test_past_the_limit_a_request_is_refused_until_one_leaves() -> None:
    admission = Admission(1)
    leave = admission.enter()
    with pytest.raises(RequestError) as caught:
        admission.enter()
    assert caught.value.reason is FailureReason.QUEUE_FULL
    assert caught.value.retry_after_ms
    leave()
    admission.enter()
    assert admission.num_running == 1


def test_draining_refuses_all_new_requests() -> None:
    admission = Admission(9)
    admission.drain()
    with pytest.raises(RequestError) as caught:
        admission.enter()
    assert caught.value.reason is FailureReason.DRAINING


async def test_idle_means_that_the_last_request_has_left() -> None:
    admission = Admission(9)
    await admission.wait_until_idle()
    leave = admission.enter()
    waiting = asyncio.create_task(admission.wait_until_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    leave()
    await waiting
