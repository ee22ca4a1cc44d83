import logging
import math
import time
from collections.abc import Callable, Iterator

import pytest

from shared import tracing, tracing_otel
from tests.shared.otlp_receiver import Received, Receiver, otlp_receiver

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"


@pytest.fixture(autouse=True)
def _quick_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        tracing.configure("scheduler")
        yield receiver
        tracing.shutdown()


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def by_name(receiver: Receiver, *names: str) -> dict[str, Received]:
    return {span.name: span for span in receiver.wait_for(*names, timeout_s=60.0)}


def test_spans_form_a_tree_below_the_callers_context(receiver: Receiver) -> None:
    assert tracing.is_enabled()
    with tracing.start_span("Submit", traceparent=PARENT, attributes={"n": 3}) as outer:
        assert tracing.current_traceparent() == outer.traceparent
        inner = tracing.start_span("queue")
        inner.set("waited", True)
        inner.end()
    assert tracing.current_traceparent() == ""
    tracing.start_span("decode", traceparent=outer.traceparent).end()
    spans = by_name(receiver, "Submit", "queue", "decode")
    assert (spans["Submit"].trace_id, spans["Submit"].parent_id) == (TRACE_ID, SPAN_ID)
    assert spans["queue"].parent_id == spans["decode"].parent_id == spans["Submit"].span_id
    assert spans["queue"].attributes == {"waited": True}
    assert spans["Submit"].attributes == {"n": 3}
    assert spans["Submit"].service == "glm-mesh-scheduler"


def test_an_exception_marks_the_span_without_its_text(receiver: Receiver) -> None:
    with pytest.raises(ValueError), tracing.start_span("Submit"):
        raise ValueError("secret")
    span = by_name(receiver, "Submit")["Submit"]
    assert span.is_error
    assert "secret" not in str(span)


def test_an_unsampled_caller_gets_no_spans_but_keeps_its_context(receiver: Receiver) -> None:
    span = tracing.start_span("Submit", traceparent=UNSAMPLED)
    assert span.traceparent.startswith(f"00-{TRACE_ID}-")
    assert span.traceparent.endswith("-00")
    span.end()
    tracing.start_span("marker").end()
    assert "Submit" not in by_name(receiver, "marker")


def test_what_happens_meanwhile_is_on_the_span(receiver: Receiver) -> None:
    with tracing.start_span("Submit") as span:
        span.event("resumed", {"num_tokens": 7})
    assert by_name(receiver, "Submit")["Submit"].events == [("resumed", {"num_tokens": 7})]


def test_a_span_ends_once_at_the_time_given(receiver: Receiver) -> None:
    span = tracing.start_span("prefill", start_ns=1_000)
    span.end(3_000)
    span.end(9_000)
    found = by_name(receiver, "prefill")["prefill"]
    assert (found.start_ns, found.end_ns) == (1_000, 3_000)


def test_a_malformed_context_starts_a_trace_of_its_own(receiver: Receiver) -> None:
    tracing.start_span("Submit", traceparent="rubbish\n").end()
    assert by_name(receiver, "Submit")["Submit"].parent_id == ""


def test_shutdown_sends_what_is_left(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    tracing.shutdown()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    tracing.configure("worker")
    tracing.start_span("last").end()
    tracing.shutdown(30.0)
    assert "last" in by_name(receiver, "last")
    assert not tracing.is_enabled()


def test_a_collector_that_is_away_costs_a_warning_and_a_bounded_exit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with caplog.at_level(logging.WARNING):
        tracing.configure("worker")
        tracing.start_span("lost").end()
        wait_until(lambda: "spans are dropped" in caplog.text)
        before = time.monotonic()
        tracing.shutdown(1.0)
    assert time.monotonic() - before < 8  # what it sends in vain is tried again for 10 s


def test_a_collector_that_is_away_is_not_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Services end one behind the other: what each waits in vain adds up."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with caplog.at_level(logging.WARNING):
        tracing.configure("worker")
        tracer = tracing._process.tracer
        assert isinstance(tracer, tracing_otel.OtelTracer)
        (exporter,) = tracer._exporters
        wait_until(lambda: exporter._began_at < math.inf)
        # The first batch is being tried for longer than the limit by now.
        monkeypatch.setattr(exporter, "_began_at", exporter._began_at - 60.0)
        before = time.monotonic()
        tracing.shutdown(30.0)
    assert time.monotonic() - before < 15
    assert "spans left unsent" in caplog.text
