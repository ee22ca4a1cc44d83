"""The OpenTelemetry side of `shared.tracing`; imported only when tracing is on.

Export runs in the background behind a bounded queue; a collector that is slow or away costs spans,
never a request. The first outcome and every change of it are logged.
"""

import atexit
import contextvars
import math
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from shared.log import get_logger

_logger = get_logger(__name__)


class OtelTracer:
    """Makes spans and sends them."""

    def __init__(self, service_name: str, exporters: Sequence[str]) -> None:
        """Start the background export; samplers and limits follow the OTEL_* variables."""
        resource = Resource.create(
            {"service.name": f"glm-mesh-{service_name}", "service.namespace": "glm-mesh"}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporters = [
            LoggedExporter(OTLPSpanExporter() if name == "otlp" else ConsoleSpanExporter(), name)
            for name in exporters
        ]
        for exporter in self._exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("glm-mesh")
        self._propagator = TraceContextTextMapPropagator()
        atexit.register(self.shutdown, 1.0)
        # Tells at once, in the log, whether the collector can be reached.
        self.start("start", "", None, None).end()

    def start(
        self,
        name: str,
        traceparent: str,
        attributes: Mapping[str, AttributeValue] | None,
        start_ns: int | None,
    ) -> "OtelSpan":
        """Start a span below `traceparent`, else below the current span, else as a root."""
        parent: Context | None = None
        if traceparent:
            parent = self._propagator.extract({"traceparent": traceparent}, Context())
        return OtelSpan(
            self._tracer.start_span(name, parent, attributes=attributes, start_time=start_ns)
        )

    def current_traceparent(self) -> str:
        """Context of the current span; empty for none."""
        return _traceparent_of(trace.get_current_span())

    def shutdown(self, limit_s: float) -> None:
        """Send what is left; the SDK's own limits are not kept when a collector hangs.

        A collector that is away is not waited for: services end one behind the other, and each
        would wait in vain.
        """
        atexit.unregister(self.shutdown)
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        if any(exporter.may_send(limit_s) for exporter in self._exporters):
            sender.join(limit_s)
        if sender.is_alive():
            _logger.warning("spans left unsent: the collector does not take them")
            for exporter in self._exporters:
                exporter.shutdown()  # wakes the thread that waits to try again


class OtelSpan:
    """A recorded span."""

    def __init__(self, span: trace.Span) -> None:
        """Wrap a started span."""
        self._span = span
        self._token: contextvars.Token[Context] | None = None

    @property
    def traceparent(self) -> str:
        """W3C context of the span."""
        return _traceparent_of(self._span)

    def set(self, name: str, value: AttributeValue) -> None:
        """Add an attribute."""
        self._span.set_attribute(name, value)

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Note something that happens now."""
        self._span.add_event(name, dict(attributes))

    def fail(self, reason: str) -> None:
        """Mark the span as failed."""
        self._span.set_status(trace.StatusCode.ERROR, reason)

    def end(self, end_ns: int | None = None) -> None:
        """End the span; ended already, change nothing."""
        if self._span.is_recording():
            self._span.end(end_ns)

    def __enter__(self) -> Self:
        """Make the span current."""
        self._token = attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        """End the span; an exception marks it as failed by its class, never by its text."""
        if self._token is not None:
            detach(self._token)
            self._token = None
        if kind is not None:
            self.fail(kind.__name__)
        self.end()


class LoggedExporter(SpanExporter):
    """Passes spans on and logs when the outcome changes."""

    def __init__(self, exporter: SpanExporter, name: str) -> None:
        """Wrap the exporter called `name`."""
        self._exporter = exporter
        self._name = name
        self._last: SpanExportResult | None = None
        self._began_at = math.inf
        self._is_ended = False

    def may_send(self, limit_s: float) -> bool:
        """Whether waiting for so long may help: it did not fail, nor try longer than that."""
        is_stuck = time.monotonic() - self._began_at > limit_s
        return self._last is not SpanExportResult.FAILURE and not is_stuck

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self._began_at = time.monotonic()
        result = self._exporter.export(spans)
        self._began_at = math.inf
        if result is not self._last:
            self._last = result
            if result is SpanExportResult.SUCCESS:
                _logger.info("spans reach the %s exporter's target", self._name)
            else:
                _logger.warning("the %s exporter cannot send: spans are dropped", self._name)
        return result

    def shutdown(self) -> None:
        """End the exporter, once."""
        if not self._is_ended:
            self._is_ended = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Pass on."""
        return self._exporter.force_flush(timeout_millis)


def _traceparent_of(span: trace.Span) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
