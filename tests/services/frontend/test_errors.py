"""The one envelope."""

import json

import pytest

from services.frontend.errors import ApiError, context_exceeded, from_request_error, invalid
from shared.errors import OUTCOMES, FailureReason, RequestError


@pytest.mark.parametrize("reason", FailureReason)
def test_every_reason_has_a_status_type_and_code(reason: FailureReason) -> None:
    answer = from_request_error(RequestError(reason, "text", field="f"))
    assert answer.status == OUTCOMES[reason].http_status
    assert answer.code
    assert answer.param == "f"
    assert (answer.type == "server_error") is (answer.status >= 500)
    assert ("retry-after" in answer.headers) is (answer.status in (429, 503))


@pytest.mark.parametrize(("wait_ms", "seconds"), [(None, "1"), (0, "1"), (1, "1"), (2500, "3")])
def test_the_wait_before_a_retry_is_in_whole_seconds_at_least_one(
    wait_ms: int | None, seconds: str
) -> None:
    error = RequestError(FailureReason.QUEUE_FULL, "full", retry_after_ms=wait_ms)
    assert from_request_error(error).headers["retry-after"] == seconds


def test_the_body_is_strict_json_whatever_the_message_quotes() -> None:
    body = ApiError(400, 'a "quote"\n\ud800 é').body()
    assert json.loads(body)["error"]["message"] == 'a "quote"\n? é'
    assert b"\n" not in body


def test_the_envelope_has_exactly_four_fields() -> None:
    fields = json.loads(invalid("m", "p").body())["error"]
    assert fields == {
        "message": "m", "type": "invalid_request_error", "param": "p", "code": "invalid_value",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("max_tokens", "is_bound", "words"),
    [(None, False, "at least 31 tokens"), (12, False, " 42 tokens"), (None, True, "at least 31")],
)
def test_a_context_error_has_both_numbers(
    max_tokens: int | None, is_bound: bool, words: str
) -> None:
    error = context_exceeded(20, 30, max_tokens, "prompt", is_lower_bound=is_bound)
    assert "length is 20 tokens" in error.message
    assert words in error.message
