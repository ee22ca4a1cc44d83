"""Spans of a request, exported as the standard OTEL_* variables say; off unless they ask for it.

Off means: OpenTelemetry is not imported, `start_span` returns a value that ignores everything and
passes the caller's context on, so a mesh with one silent service still makes one connected trace.
The context travels as a W3C `traceparent` string inside the message that introduces a request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from shared.tracing_env import exporters_asked_for

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int]


class Span(Protocol):
    """One timed part of a request; as a context manager it is current inside and ends outside."""

    @property
    def traceparent(self) -> str:
        """The W3C context to hand to whoever works on below this span; empty for none."""

    def set(self, name: str, value: AttributeValue) -> None:
        """Add an attribute."""

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Note something that happens now."""

    def fail(self, reason: str) -> None:
        """Mark the span as failed."""

    def end(self, end_ns: int | None = None) -> None:
        """End now or at `end_ns` (epoch, nanoseconds). Once; later calls change nothing."""

    def __enter__(self) -> Self:
        """Make the span current."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the span; an exception marks it as failed."""


class Tracer(Protocol):
    """What makes spans once tracing is on."""

    def start(
        self,
        name: str,
        traceparent: str,
        attributes: Mapping[str, AttributeValue] | None,
        start_ns: int | None,
    ) -> Span:
        """Start a span below `traceparent`, else below the current span, else as a root."""

    def current_traceparent(self) -> str:
        """Context of the current span; empty for none."""

    def shutdown(self, limit_s: float) -> None:
        """Send what is left, for at most `limit_s`."""


@dataclass(frozen=True, slots=True)
class PassingSpan:
    """A span that records nothing and hands its parent's context on."""

    traceparent: str = ""

    def set(self, name: str, value: AttributeValue) -> None:
        """Ignore."""

    def event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Ignore."""

    def fail(self, reason: str) -> None:
        """Ignore."""

    def end(self, end_ns: int | None = None) -> None:
        """Ignore."""

    def __enter__(self) -> Self:
        """Change nothing."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Change nothing."""


@dataclass(slots=True)
class _Process:
    """The tracer of this process: tracing is global by nature, as it is in OpenTelemetry."""

    tracer: Tracer | None = None


_process: Final = _Process()
_NO_SPAN: Final = PassingSpan()


def configure(service_name: str) -> None:
    """Switch tracing on if the environment asks for it; called once by `__main__`.

    Raises:
        ConfigError: A variable names an exporter or protocol that does not exist here.
    """
    exporters = exporters_asked_for()
    if not exporters:
        return
    from shared.tracing_otel import OtelTracer  # noqa: PLC0415  # only who traces pays the import

    _process.tracer = OtelTracer(service_name, exporters)


def is_enabled() -> bool:
    """Whether spans are recorded."""
    return _process.tracer is not None


def start_span(
    name: str,
    *,
    traceparent: str = "",
    attributes: Mapping[str, AttributeValue] | None = None,
    start_ns: int | None = None,
) -> Span:
    """Start a span.

    Args:
        name: RPC name, or the phase's own name.
        traceparent: Parent that came with the request; empty takes the current span.
        attributes: Facts known at the start.
        start_ns: Start in the past, epoch nanoseconds.
    """
    tracer = _process.tracer
    if tracer is None:
        return PassingSpan(traceparent) if traceparent else _NO_SPAN
    return tracer.start(name, traceparent, attributes, start_ns)


def current_traceparent() -> str:
    """Context of the current span; empty for none."""
    tracer = _process.tracer
    return "" if tracer is None else tracer.current_traceparent()


def shutdown(limit_s: float = 1.0) -> None:
    """Send what is left, for at most `limit_s`, and switch tracing off."""
    tracer, _process.tracer = _process.tracer, None
    if tracer is not None:
        tracer.shutdown(limit_s)
