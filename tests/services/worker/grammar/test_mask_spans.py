"""What masks of a traced request took."""

from typing import Any

import pytest

from services.worker.grammar import mask_spans
from services.worker.grammar.mask_spans import MaskSpans
from tests.services.worker.plans import make_sequence


class Recorder:
    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self.spans: list[tuple[str, Any, Any, Any]] = []
        self.ended: list[int] = []

    def is_enabled(self) -> bool:
        return self._is_enabled

    def start_span(self, name: str, *, traceparent: str, attributes: Any, start_ns: int) -> Any:
        self.spans.append((name, traceparent, attributes, start_ns))
        return self

    def end(self, end_ns: int) -> None:
        self.ended.append(end_ns)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(is_enabled=True)
    monkeypatch.setattr(mask_spans, "tracing", found)
    return found


def test_a_traced_row_has_one_span_with_its_cost(recorder: Recorder) -> None:
    spans = MaskSpans()
    spans.start(make_sequence(3, [1], traceparent="tp"))
    spans.add(3, 1, 4_000)
    spans.add(3, 2, 8_000)
    spans.end(3)
    spans.end(3)
    ((name, traceparent, attributes, start_ns),) = recorder.spans
    assert (name, traceparent) == ("worker.masks", "tp")
    assert attributes == {"request_id": "r3", "num_masks": 3, "mask_us": 12}
    assert recorder.ended[0] >= start_ns


def test_other_rows_and_rows_of_an_epoch_that_is_over_have_none(recorder: Recorder) -> None:
    spans = MaskSpans()
    spans.start(make_sequence(1, [1]))
    spans.add(1, 1, 1)
    spans.end(1)
    spans.start(make_sequence(2, [1], traceparent="tp"))
    spans.clear()
    spans.end(2)
    assert not recorder.spans


def test_without_tracing_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    off = Recorder(is_enabled=False)
    monkeypatch.setattr(mask_spans, "tracing", off)
    spans = MaskSpans()
    spans.start(make_sequence(1, [1], traceparent="tp"))
    spans.end(1)
    assert not off.spans
