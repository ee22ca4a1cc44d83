import pytest

from services.detokenizer.time_limits import TimeLimits
from shared.errors import FailureReason, RequestError

LIMITS = TimeLimits(started_at=10.0, timeout_ms=5_000, first_token_timeout_ms=2_000)


@pytest.mark.parametrize(
    ("now", "has_first_tokens", "text"),
    [
        (11.9, False, None),
        (12.1, False, "no first token within 2000 ms"),
        (12.1, True, None),
        (14.9, True, None),
        (15.0, True, "the time limit of the request is over: 5000 ms"),
    ],
)
def test_a_request_ends_at_the_first_limit_that_it_misses(
    now: float, has_first_tokens: bool, text: str | None
) -> None:
    error = LIMITS.error_at(now, has_first_tokens=has_first_tokens)
    assert (error.message if error else None) == text
    assert error is None or error.reason is FailureReason.DEADLINE_EXCEEDED


def test_a_scheduler_that_ends_it_in_time_is_not_overtaken() -> None:
    assert LIMITS.error_at(12.005, has_first_tokens=False) is None


def test_without_a_limit_the_first_token_may_come_any_time() -> None:
    limits = TimeLimits(started_at=0.0, timeout_ms=5_000)
    assert limits.error_at(4.9, has_first_tokens=False) is None


def test_other_ends_keep_their_text() -> None:
    error = RequestError(FailureReason.UPSTREAM_LOST, "gone")
    assert LIMITS.named(error) is error
