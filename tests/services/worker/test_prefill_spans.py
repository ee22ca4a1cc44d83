from typing import Any

import numpy as np
import pytest

from services.worker import prefill_spans
from services.worker.plan import RowFailure, StepResult
from services.worker.prefill_spans import PrefillSpans
from shared.errors import FailureReason, RequestError
from tests.services.worker.plans import Entry, make_plan, make_sequence

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Span:
    def end(self, end_ns: int | None = None) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []

    def start_span(name: str, **facts: Any) -> Span:
        spans.append({"name": name} | facts)
        return Span()

    monkeypatch.setattr(prefill_spans.tracing, "is_enabled", lambda: True)
    monkeypatch.setattr(prefill_spans.tracing, "start_span", start_span)
    return spans


def plan(**changes: Any) -> Any:
    new = make_sequence(2, [1, 2, 3], traceparent=PARENT, **changes)
    return make_plan(1, {2: Entry(scheduled=2, blocks=(1,))}, new=[new])


def result(num_sampled: int, *, is_failed: bool = False) -> StepResult:
    error = RequestError(FailureReason.NUMERICAL_ERROR, "x")
    return StepResult(
        step=1,
        rows=np.array([2]),
        num_sampled_tokens=np.array([num_sampled]),
        row_failures=(RowFailure(row=2, error=error),) if is_failed else (),
    )


def test_a_prefill_of_two_chunks_is_one_span_below_the_request(started: list) -> None:
    spans = PrefillSpans()
    spans.see_plan(plan(computed=1))
    spans.see_result(result(0))
    assert not started
    spans.see_result(result(1))
    spans.see_result(result(1))
    assert len(started) == 1
    assert started[0]["name"] == "worker.prefill"
    assert started[0]["traceparent"] == PARENT
    facts = started[0]["attributes"]
    assert (facts["num_prompt_tokens"], facts["num_cached_tokens"]) == (3, 1)
    assert facts["num_chunks"] == 2


def test_a_failed_row_ends_its_span(started: list) -> None:
    spans = PrefillSpans()
    spans.see_plan(plan())
    spans.see_result(result(0, is_failed=True))
    assert started[0]["attributes"]["is_failed"] is True


def test_a_request_without_context_or_a_process_without_tracing_makes_no_span(
    started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = PrefillSpans()
    untraced = make_plan(1, {2: Entry()}, new=[make_sequence(2, [1])])
    spans.see_plan(untraced)
    spans.see_result(result(1))
    monkeypatch.setattr(prefill_spans.tracing, "is_enabled", lambda: False)
    spans = PrefillSpans()
    spans.see_plan(plan())
    spans.see_result(result(1))
    assert not started


def test_an_epoch_that_ends_leaves_no_open_span(started: list) -> None:
    spans = PrefillSpans()
    spans.see_plan(plan())
    spans.clear()
    spans.see_result(result(1))
    assert not started
