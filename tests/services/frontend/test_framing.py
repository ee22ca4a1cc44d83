"""What the gateway itself says into a stream."""

import json

import pytest

from services.frontend.errors import ApiError
from services.frontend.framing import (
    CHUNKS,
    MessageFraming,
    ResponseFraming,
    message_error,
)

ERROR = ApiError(503, "lost é", param="p", code="service_unavailable")


def document_of(frame: bytes) -> dict:
    return json.loads(frame.decode().partition("data: ")[2])


def test_chunks_end_with_the_envelope_and_done() -> None:
    first, second, rest = CHUNKS.failure(ERROR, 3).decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert (second, rest) == ("data: [DONE]", "")
    assert CHUNKS.keep_alive.startswith(b":")


def test_a_response_ends_with_an_error_event_of_the_next_number() -> None:
    frame = ResponseFraming().failure(ERROR, 3)
    assert frame.startswith(b"event: error\n")
    assert document_of(frame) == {
        "type": "error",
        "code": "service_unavailable",
        "message": "lost é",
        "param": "p",
        "sequence_number": 3,
    }


def test_a_message_ends_with_an_error_event_and_is_kept_alive_by_pings() -> None:
    framing = MessageFraming()
    frame = framing.failure(ERROR, 3)
    assert frame.startswith(b"event: error\n")
    assert document_of(frame) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "lost é"},
    }
    assert framing.keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_each_status_has_its_type_in_the_messages_api(status: int, kind: str) -> None:
    shown = json.loads(message_error(ApiError(status, "no"), "req_1"))
    assert shown["error"] == {"type": kind, "message": "no"}
    assert shown["request_id"] == "req_1"
