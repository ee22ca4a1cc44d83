"""Three spans per traced sequence, with the times of its stations."""

from collections.abc import Mapping

import pytest

from services.scheduler.messages import SequenceEnd
from services.scheduler.spans import record_spans
from shared import tracing
from shared.endings import FinishReason
from shared.errors import FailureReason, RequestError
from tests.services.scheduler.builders import sequence


class Recorded:
    def __init__(
        self, name: str, parent: str, attributes: Mapping[str, object], start_ns: int
    ) -> None:
        self.name, self.parent, self.attributes, self.start_ns = name, parent, attributes, start_ns
        self.end_ns: int | None = None
        self.failure = ""

    def fail(self, reason: str) -> None:
        self.failure = reason

    def end(self, end_ns: int | None = None) -> None:
        self.end_ns = end_ns


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    recorded: list[Recorded] = []

    def start(
        name: str, *, traceparent: str, attributes: Mapping[str, object], start_ns: int
    ) -> Recorded:
        recorded.append(Recorded(name, traceparent, attributes, start_ns))
        return recorded[-1]

    monkeypatch.setattr(tracing, "start_span", start)
    return recorded


def end(*, planned_at: float | None, first_token_at: float | None, is_failed: bool) -> SequenceEnd:
    one = sequence(arrived_at=1.0)
    one.planned_at, one.first_token_at = planned_at, first_token_at
    one.output_token_ids.append(3)
    return SequenceEnd(
        stream_id=1,
        finish_reason=None if is_failed else FinishReason.STOP,
        failure=RequestError(FailureReason.UPSTREAM_LOST, "x") if is_failed else None,
        stats=one.stats(4.0, 1),
        timeline=one.timeline(4.0),
    )


def test_a_finished_sequence_has_queue_prefill_and_decode(spans: list[Recorded]) -> None:
    record_spans([end(planned_at=1.5, first_token_at=2.0, is_failed=False)], now=4.0)
    assert [span.name for span in spans] == ["queue", "prefill", "decode"]
    lengths = [(span.end_ns or 0) - span.start_ns for span in spans]
    assert lengths == [500_000_000, 500_000_000, 2_000_000_000]
    assert spans[0].end_ns == spans[1].start_ns
    assert {span.parent for span in spans} == {"00-a-b-01"}
    assert {span.attributes["request_id"] for span in spans} == {"r"}
    assert spans[1].attributes["num_prompt_tokens"] == 5
    assert spans[2].attributes["num_output_tokens"] == 1
    assert not any(span.failure for span in spans)


def test_a_failure_marks_the_phase_in_which_it_came(spans: list[Recorded]) -> None:
    record_spans([end(planned_at=1.5, first_token_at=None, is_failed=True)], now=4.0)
    assert [(span.name, span.failure) for span in spans] == [
        ("queue", ""),
        ("prefill", "UPSTREAM_LOST"),
    ]


def test_a_sequence_that_never_ran_has_only_a_queue(spans: list[Recorded]) -> None:
    record_spans([end(planned_at=None, first_token_at=None, is_failed=True)], now=4.0)
    assert [(span.name, span.failure) for span in spans] == [("queue", "UPSTREAM_LOST")]


def test_an_untraced_request_makes_no_span(spans: list[Recorded]) -> None:
    one = sequence()
    one.request.traceparent = ""
    ended = SequenceEnd(
        stream_id=1,
        finish_reason=FinishReason.STOP,
        stats=one.stats(1.0, 0),
        timeline=one.timeline(1.0),
    )
    record_spans([ended], now=1.0)
    assert not spans
