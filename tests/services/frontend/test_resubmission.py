"""What it takes to submit a request again."""

from array import array
from dataclasses import replace

import pytest

from services.frontend import resubmission
from services.frontend.exchange import Exchange
from services.frontend.resubmission import Job, Limits, in_time, packed
from services.frontend.submission import ObjectKind, OutputPlan, SequencePlan, Submission
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec, SequenceStats


def submission(**fields: int) -> Submission:
    ids = [1, 2, 3]
    return Submission(
        request_id="r",
        sequences=tuple(SequencePlan(index=i, prompt_token_ids=ids, seed=i) for i in range(2)),
        sampling=SamplingSpec(),
        output=OutputPlan(
            object_kind=ObjectKind.CHAT_COMPLETION, response_id="r", model="m", created_s=1
        ),
        **fields,
    )


def job(kept: Submission | None) -> Job[str]:
    return Job("a", kept, 10, 0.0)


def test_prompts_are_kept_at_four_bytes_per_token_and_once_for_all_choices() -> None:
    first, second = packed(submission()).sequences
    assert first.prompt_token_ids == array("I", [1, 2, 3])
    assert first.prompt_token_ids is second.prompt_token_ids


def test_a_request_moves_while_nothing_of_it_has_left() -> None:
    kept = job(submission())
    exchange = Exchange("r")
    assert kept.may_move(exchange)
    exchange.push(b"waits here")
    assert kept.may_move(exchange)
    exchange.take()
    assert not kept.may_move(exchange)


def test_what_went_past_the_reader_has_left_as_well() -> None:
    exchange = Exchange("r")
    exchange.sink = lambda piece: True
    exchange.push(b"a")
    assert not job(submission()).may_move(exchange)


def test_neither_what_has_ended_nor_what_is_not_kept_moves() -> None:
    exchange = Exchange("r")
    assert not job(None).may_move(exchange)
    exchange.finish("stop", SequenceStats())
    assert not job(submission()).may_move(exchange)


def test_each_move_is_another_attempt_and_forgets_what_came() -> None:
    kept = job(submission())
    exchange = Exchange("r")
    exchange.admit()
    exchange.push(b"old")
    assert [kept.begin_move(exchange, "lost") for _ in range(2)] == [1, 2]
    assert kept.submission is not None
    assert kept.submission.attempt == 2
    assert exchange.take() == b""
    assert exchange.is_admitted


class Recorder:
    """A span that tells what became of it."""

    def __init__(self) -> None:
        self.traceparent = ""
        self.told: list[str] = []

    def fail(self, reason: str) -> None:
        self.told.append(reason)

    def end(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("is_placed", [True, False])
def test_each_gap_is_a_span_of_the_requests_trace(
    monkeypatch: pytest.MonkeyPatch, is_placed: bool
) -> None:
    started: list[tuple[str, dict[str, object]]] = []
    span = Recorder()

    def start(name: str, *, traceparent: str, attributes: dict[str, object]) -> Recorder:
        started.append((f"{name} under {traceparent}", attributes))
        return span

    monkeypatch.setattr(resubmission, "start_span", start)
    kept = job(replace(submission(), traceparent="00-aa"))
    kept.begin_move(Exchange("r"), "lost")
    facts = {"glm.request_id": "r", "glm.attempt": 1, "glm.cause": "lost"}
    assert started == [("resubmit under 00-aa", facts)]
    assert span.told == []
    for _ in range(2):
        kept.end_wait(is_placed=is_placed)
    assert span.told == (["end"] if is_placed else ["no detokenizer took it", "end"])


def test_limits_go_on_running() -> None:
    again = in_time(submission(timeout_ms=5000, first_token_timeout_ms=0), 1.5)
    assert (again.timeout_ms, again.first_token_timeout_ms) == (3500, 0)
    assert in_time(submission(first_token_timeout_ms=900), 0.5).first_token_timeout_ms == 400


@pytest.mark.parametrize(
    ("name", "words"), [("timeout_ms", "did not end"), ("first_token_timeout_ms", "no token")]
)
def test_a_request_whose_time_is_over_fails_by_name(name: str, words: str) -> None:
    with pytest.raises(RequestError, match=f"{words}.*1000 ms") as caught:
        in_time(submission(**{name: 1000}), 1.0)
    assert caught.value.reason is FailureReason.DEADLINE_EXCEEDED


def test_the_limit_of_the_first_token_is_no_matter_once_it_may_have_come() -> None:
    limits = Limits(timeout_ms=5_000, first_token_timeout_ms=1_000)
    assert limits.error_at(0.9, has_first_token=False) is None
    late = limits.error_at(1.0, has_first_token=False)
    assert late is not None
    assert (late.reason, late.field) == (
        FailureReason.DEADLINE_EXCEEDED,
        "first_token_timeout_ms",
    )
    assert limits.error_at(4.9, has_first_token=True) is None
    assert limits.error_at(5.0, has_first_token=True) is not None
    assert Limits().error_at(1e6, has_first_token=False) is None
