import pytest

from services.detokenizer.build import build_response
from services.detokenizer.live import LiveRequests
from shared.errors import FailureReason, RequestError
from tests.services.detokenizer.frames import CONTEXT, submit


def test_requests_are_found_and_ended_by_their_label() -> None:
    live = LiveRequests()
    responses = [build_response(submit(), CONTEXT, 0.0) for _ in range(2)]
    for response in responses:
        live.add(response)
    assert live.abort("other") == 0
    assert live.abort("r") == 2
    assert all(response.is_over for response in responses)
    assert live.abort("r") == 0, "aborting again finds nothing live"
    live.discard(responses[0])
    live.discard(responses[0])
    assert len(live) == 1


def test_a_draining_service_takes_no_more() -> None:
    live = LiveRequests()
    live.check_open()
    live.is_draining = True
    with pytest.raises(RequestError) as caught:
        live.check_open()
    assert caught.value.reason is FailureReason.DRAINING
    assert caught.value.retry_after_ms is not None


def test_what_is_left_after_a_drain_fails() -> None:
    live, response = LiveRequests(), build_response(submit(), CONTEXT, 0.0)
    live.add(response)
    live.abort_all(RequestError(FailureReason.DRAINING, "stopping"))
    assert response.refusal is not None
