from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.detokenizer.build import build_response, upstream_submit
from services.detokenizer.messages import TextFinished
from services.detokenizer.response import Response
from services.detokenizer.time_limits import TimeLimits
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from shared.sampling import SequenceStats
from tests.services.detokenizer.frames import (
    CONTEXT,
    SPECS,
    FakeUpstream,
    finished,
    logprobs,
    submit,
)
from tests.services.detokenizer.words import EOS, ids


def started(
    num_sequences: int = 1, *, upstream: FakeUpstream | None = None, **options: Any
) -> tuple[Response, FakeUpstream]:
    peer = upstream or FakeUpstream()
    request = submit(num_sequences, **options)
    response = build_response(request, CONTEXT, 0.0)
    response.start(peer, upstream_submit(request, response, CONTEXT, "internal"))
    return response, peer


def error_of(response: Response) -> FailureReason:
    end = response.end or response.refusal
    assert isinstance(end, RequestError)
    return end.reason


LOST = RequestError(FailureReason.UPSTREAM_LOST, "gone")


def test_a_request_is_admitted_when_all_its_sequences_are() -> None:
    response, _ = started(2)
    response.on_verdict(1, None)
    assert not response.is_admitted
    response.on_verdict(0, None)
    assert response.is_admitted


def test_one_refused_sequence_refuses_the_request_and_ends_the_others() -> None:
    response, peer = started(3)
    response.on_verdict(0, None)
    response.on_verdict(1, RequestError(FailureReason.QUEUE_FULL, "full"))
    assert error_of(response) is FailureReason.QUEUE_FULL
    assert sorted(stream_id for stream_id, _, _ in peer.aborts) == [0, 2]
    response.on_verdict(2, None)
    assert response.end is None


def test_without_a_scheduler_the_request_is_refused() -> None:
    response, peer = started(upstream=FakeUpstream(refusal=LOST))
    assert error_of(response) is FailureReason.UPSTREAM_LOST
    assert not peer.aborts


def test_a_request_ends_when_its_last_sequence_does() -> None:
    response, _ = started(2)
    for position in (0, 1):
        response.on_verdict(position, None)
        response.on_tokens(position, 0, ids("ab"), None)
    response.on_end(1, finished(FinishReason.LENGTH, num_steps=4))
    assert response.end is None
    response.on_end(0, finished(FinishReason.STOP))
    assert isinstance(response.end, TextFinished)
    assert response.end.reason is FinishReason.STOP
    assert response.end.stats.num_output_tokens == 4
    assert response.end.stats.num_steps == 4


def test_a_failed_sequence_fails_the_request_once() -> None:
    response, peer = started(2)
    for position in (0, 1):
        response.on_verdict(position, None)
    response.on_end(0, LOST)
    assert error_of(response) is FailureReason.UPSTREAM_LOST
    assert peer.aborts == [(1, AbortReason.CANCELLED, 0)]
    response.on_end(1, finished())
    response.abort(RequestError(FailureReason.CANCELLED, "late"))
    assert error_of(response) is FailureReason.UPSTREAM_LOST
    assert len(peer.aborts) == 1


def test_an_operators_abort_is_no_good_end() -> None:
    response, _ = started()
    response.on_verdict(0, None)
    response.on_end(0, finished(FinishReason.ABORT))
    assert error_of(response) is FailureReason.CANCELLED


def test_a_stop_string_ends_here_and_tells_the_scheduler_what_counts() -> None:
    response, peer = started(stop=("END",))
    response.on_verdict(0, None)
    response.on_tokens(0, 0, ids("abENDcd"), None)
    assert peer.aborts == [(0, AbortReason.STOP_STRING, 5)]
    assert isinstance(response.end, TextFinished)
    assert response.end.reason is FinishReason.STOP
    response.on_tokens(0, 7, ids("more"), None)
    response.on_end(0, finished(FinishReason.ABORT))
    assert isinstance(response.end, TextFinished)
    assert response.choices[0].num_tokens == 5


def test_an_end_of_its_own_has_the_counts_that_came_with_the_tokens() -> None:
    response, _ = started(stop=("END",))
    response.on_verdict(0, None)
    response.on_start(0, SequenceStats(num_cached_tokens=1, queue_us=7, prefill_us=9))
    response.on_drafts(0, 3, 1)
    response.on_tokens(0, 0, ids("ab"), None)
    response.on_drafts(0, 6, 4)
    response.on_tokens(0, 2, ids("ENDcd"), None)
    assert isinstance(response.end, TextFinished)
    stats = response.end.stats
    assert (stats.num_cached_tokens, stats.queue_us, stats.prefill_us) == (1, 7, 9)
    assert (stats.num_drafted_tokens, stats.num_accepted_tokens) == (6, 4)
    assert response.choices[0].full_stats() == stats


def test_a_stop_string_in_one_choice_leaves_the_others_running() -> None:
    response, peer = started(2, stop=("b",))
    for position in (0, 1):
        response.on_verdict(position, None)
    response.on_tokens(0, 0, ids("ab"), None)
    assert response.end is None
    response.on_tokens(1, 0, ids("xyz"), None)
    response.on_end(1, finished(FinishReason.LENGTH))
    assert isinstance(response.end, TextFinished)
    assert [stream_id for stream_id, _, _ in peer.aborts] == [0]


def test_missing_tokens_are_an_error_and_not_a_gap() -> None:
    response, peer = started()
    response.on_verdict(0, None)
    response.on_tokens(0, 0, ids("ab"), None)
    response.on_tokens(0, 3, ids("d"), None)
    assert error_of(response) is FailureReason.INTERNAL
    assert peer.aborts


def test_an_abort_before_the_verdict_is_a_refusal() -> None:
    response, peer = started()
    response.abort(RequestError(FailureReason.CANCELLED, "gone"))
    assert response.refusal is not None
    assert response.end is None
    assert peer.aborts == [(0, AbortReason.CANCELLED, 0)]


def test_the_deadline_ends_a_request_that_the_scheduler_forgot() -> None:
    response, peer = started()
    response.on_verdict(0, None)
    response.check_deadline(59.9)
    assert response.end is None
    response.check_deadline(60.0)
    assert error_of(response) is FailureReason.DEADLINE_EXCEEDED
    assert peer.aborts


def with_first_token_limit(limit_ms: int, count: int = 1) -> tuple[Response, FakeUpstream]:
    peer, request = FakeUpstream(), replace(submit(count), first_token_timeout_ms=limit_ms)
    response = build_response(request, CONTEXT, 0.0)
    response.start(peer, upstream_submit(request, response, CONTEXT, "internal"))
    return response, peer


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_first_token_that_nobody_computes_ends_the_request_in_time(is_admitted: bool) -> None:
    """The scheduler may be lost, or stand still: then it does not end the request itself."""
    response, peer = with_first_token_limit(2_000, 2)
    if is_admitted:
        response.on_verdict(0, None)
        response.on_verdict(1, None)
        response.on_tokens(0, 0, ids("ab"), None)
    response.check_deadline(1.99)
    assert not response.is_over
    response.check_deadline(2.1)
    error = response.end or response.refusal
    assert isinstance(error, RequestError)
    assert error.reason is FailureReason.DEADLINE_EXCEEDED
    assert (error.message, error.field) == (
        "no first token within 2000 ms",
        "first_token_timeout_ms",
    )
    assert len(peer.aborts) == 2


def test_the_limit_of_the_first_token_is_over_once_every_choice_has_one() -> None:
    response, _ = with_first_token_limit(2_000, 2)
    for position in (0, 1):
        response.on_verdict(position, None)
        response.on_tokens(position, 0, ids("ab"), None)
    response.check_deadline(50.0)
    assert not response.is_over
    response.check_deadline(60.0)
    assert error_of(response) is FailureReason.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("first_token_timeout_ms", "no first token within 2000 ms"),
        (None, "the time limit of the request is over: 60000 ms"),
    ],
)
def test_an_end_by_time_names_the_limit_of_the_request_and_not_the_rest_of_it(
    field: str | None, text: str
) -> None:
    """After a move the scheduler was told only what was left."""
    response, _ = with_first_token_limit(2_000)
    response.on_verdict(0, None)
    late = RequestError(FailureReason.DEADLINE_EXCEEDED, "within 320 ms", field=field)
    response.on_end(0, late)
    assert isinstance(response.end, RequestError)
    assert (response.end.message, response.end.field) == (text, field)


def test_a_reader_who_never_comes_loses_a_complete_answer() -> None:
    response, _ = started()
    response.on_verdict(0, None)
    response.on_tokens(0, 0, [*ids("ab"), EOS], None)
    response.on_end(0, finished())
    response.give_up(RequestError(FailureReason.SLOW_READER, "slow"))
    assert error_of(response) is FailureReason.SLOW_READER


def test_a_bug_ends_its_request() -> None:
    response, peer = started()
    response.on_verdict(0, None)
    response.on_fault(RequestError(FailureReason.INTERNAL, "internal error 1"))
    assert error_of(response) is FailureReason.INTERNAL
    assert peer.aborts


@dataclass
class FakeSpan:
    """Remembers what it was told."""

    traceparent: str = "tp"
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_ends: int = 0

    def set(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def event(self, name: str, attributes: Any) -> None:
        self.events.append((name, attributes))

    def fail(self, reason: str) -> None:
        self.failures.append(reason)

    def end(self, end_ns: int | None = None) -> None:
        self.num_ends += 1


def traced() -> tuple[Response, FakeSpan]:
    plain, span = build_response(submit(), CONTEXT, 0.0), FakeSpan()
    response = Response(
        "r",
        plain.choices,
        count=plain._count,
        limits=TimeLimits(started_at=0.0, timeout_ms=9_000),
        span=span,  # type: ignore[arg-type]  # no context manager
    )
    response.start(FakeUpstream(), upstream_submit(submit(), response, CONTEXT, "i"))
    response.on_verdict(0, None)
    response.on_tokens(0, 0, ids("ab"), None)
    return response, span


def test_the_span_ends_once_with_the_counts() -> None:
    response, span = traced()
    assert response.traceparent == "tp"
    response.on_end(0, finished(FinishReason.LENGTH))
    response.abort(RequestError(FailureReason.CANCELLED, "late"))
    assert (span.num_ends, span.failures) == (1, [])
    assert span.attributes == {"num_output_tokens": 2}


def test_a_scheduler_that_took_over_is_on_the_span_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    response, span = traced()
    response.on_resumed(0, 2)
    assert span.events == [("resumed", {"position": 0, "num_tokens": 2})]
    assert "goes on after a loss" in caplog.text
    assert not response.is_over


@pytest.mark.parametrize(
    ("reason", "failures"),
    [(FailureReason.UPSTREAM_LOST, ["UPSTREAM_LOST"]), (FailureReason.CANCELLED, [])],
)
def test_a_failure_marks_the_span_but_a_cancel_is_no_error(
    reason: FailureReason, failures: list[str]
) -> None:
    response, span = traced()
    response.abort(RequestError(reason, "x"))
    assert (span.num_ends, span.failures) == (1, failures)


def test_odd_output_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    response, _ = started(starts_in_reasoning=True)
    response.on_verdict(0, None)
    response.on_tokens(0, 0, ids("a thought"), None)
    response.on_end(0, finished(FinishReason.LENGTH))
    (record,) = (record for record in caplog.records if record.message == "odd output")
    assert record.num_unclosed_reasoning == 1  # type: ignore[attr-defined]  # an extra field
    assert record.request_id == "r"  # type: ignore[attr-defined]  # an extra field


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a thought", {"num_unclosed_reasoning": 1}),
        ("</think><tool_call>no tool of mine</tool_call>", {"num_unreadable_calls": 1}),
        ("</think><tool_call>so <tool_call>now</tool_call>", {"num_unreadable_calls": 1}),
        ("</think>a<tool_call>what is", {"num_unreadable_calls": 1}),
        ("</think><tool_call>nope</tool_call>", {"num_dropped_calls": 1}),
        ("</think>a<tool_call>now</tool_call>", {}),
    ],
)
def test_the_end_counts_what_the_dialect_does_not_want(text: str, expected: dict[str, int]) -> None:
    response, _ = started(starts_in_reasoning=True, tools=SPECS)
    response.on_verdict(0, None)
    response.on_tokens(0, 0, ids(text), None)
    response.on_end(0, finished())
    assert isinstance(response.end, TextFinished)
    assert response.end.oddities.found == expected


@pytest.mark.parametrize("told", [LOST, finished()])
def test_whatever_ends_a_request_is_announced(told: Any) -> None:
    response, _ = started()
    changes: list[None] = []
    response.on_change = lambda: changes.append(None)
    response.on_verdict(0, None)
    response.on_tokens(0, 0, ids("a"), None)
    assert len(changes) == 2
    response.on_end(0, told)
    assert len(changes) > 2


def test_what_a_prompt_is_worth_may_come_in_pieces_and_again() -> None:
    response, _ = started(include_prompt_logprobs=True)
    response.on_verdict(0, None)
    one, two, again = logprobs(1), logprobs(2), logprobs(3)
    response.on_prompt_logprobs(0, 1, one)
    response.on_prompt_logprobs(0, 2, two[:1])
    response.on_prompt_logprobs(0, 1, again)  # the prompt was computed again
    assert response.choices[0].prompt_logprobs == [*one, *two[:1], again[2]]
    response.on_prompt_logprobs(0, 6, one)
    assert error_of(response) is FailureReason.INTERNAL
