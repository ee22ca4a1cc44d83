"""Refusals with a time: when the queue has drained, when a first token can come."""

from dataclasses import replace

import pytest

from services.scheduler.backlog import (
    MAX_RETRY_MS,
    MIN_RETRY_MS,
    Backlog,
    check_first_token,
    check_room,
)
from services.scheduler.limits import CoreConfig
from shared.errors import FailureReason, RequestError

BUSY = Backlog(
    num_sequences=20,
    num_tokens=10_000,
    num_catch_up_tokens=2_000,
    sequences_per_s=4.0,
    prompt_tokens_per_s=1_000.0,
)
CONFIG = CoreConfig(max_queued_requests=20, max_queued_tokens=100_000)


def refused_room(backlog: Backlog, num_tokens: int = 10) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_room(backlog, CONFIG, num_tokens)
    assert caught.value.reason is FailureReason.QUEUE_FULL
    return caught.value


def test_a_full_queue_is_told_with_the_time_in_which_it_drains() -> None:
    """20 sequences at 4 per second are 5 s, their 12,000 tokens at 1,000 per second 12 s."""
    assert refused_room(BUSY).retry_after_ms == 12_000
    assert refused_room(replace(BUSY, prompt_tokens_per_s=1e9)).retry_after_ms == 5_000


def test_without_measurements_the_shortest_time_is_told_and_at_a_standstill_the_longest() -> None:
    unknown = replace(BUSY, sequences_per_s=None, prompt_tokens_per_s=0.0)
    assert refused_room(unknown).retry_after_ms == MIN_RETRY_MS
    assert refused_room(replace(BUSY, sequences_per_s=0.0)).retry_after_ms == MAX_RETRY_MS


def test_tokens_are_bounded_as_well() -> None:
    few = replace(BUSY, num_sequences=2, num_tokens=99_000)
    refused_room(few, 2_000)
    check_room(few, CONFIG, 1_000)


def test_an_empty_queue_takes_anything() -> None:
    check_room(replace(BUSY, num_sequences=0, num_tokens=0), CONFIG, 10**9)


def refused_budget(backlog: Backlog, limit_s: float, num_tokens: int, before: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_first_token(backlog, limit_s, num_tokens, before)
    assert caught.value.field == "first_token_timeout_ms"
    return caught.value


def test_a_prompt_that_takes_longer_than_its_budget_is_refused_for_good() -> None:
    error = refused_budget(BUSY, 1.0, 1_500, 0)
    assert error.reason is FailureReason.DEADLINE_EXCEEDED
    assert error.retry_after_ms is None
    assert "1500 prompt tokens take about 1.5 s" in error.message


def test_a_budget_that_the_queue_uses_up_is_refused_with_a_time_to_come_back() -> None:
    """10,000 tokens wait before it, 2,000 are under way, 500 are its own: 12.5 s."""
    error = refused_budget(BUSY, 10.0, 500, 10_000)
    assert error.reason is FailureReason.QUEUE_FULL
    assert error.retry_after_ms == 2_500
    check_first_token(BUSY, 13.0, 500, 10_000)


def test_only_those_that_come_first_count() -> None:
    check_first_token(BUSY, 3.6, 500, 1_000)


def test_rows_and_blocks_that_come_back_slowly_count_too() -> None:
    slow = replace(BUSY, prompt_tokens_per_s=1e9, sequences_per_s=0.5)
    assert refused_budget(slow, 10.0, 500, 10_000).retry_after_ms == 30_000


def test_nobody_is_refused_for_being_late_where_nothing_was_measured() -> None:
    unknown = replace(BUSY, sequences_per_s=None, prompt_tokens_per_s=0.0)
    check_first_token(unknown, 0.001, 10**6, 10**6)


def test_no_budget_is_no_limit() -> None:
    check_first_token(BUSY, 0.0, 10**6, 10**6)
