"""An OTLP collector inside the test process."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services


@dataclass(frozen=True)
class Received:
    """A span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool
    start_ns: int
    end_ns: int


class Receiver(services.TraceServiceServicer):  # type: ignore[misc]  # untyped stubs
    """Keeps every span it is sent."""

    def __init__(self) -> None:
        self._spans: list[Received] = []
        self._changed = threading.Condition()
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._changed:
            for group in request.resource_spans:
                facts = {item.key: item.value.string_value for item in group.resource.attributes}
                for scope in group.scope_spans:
                    self._spans += [_received(facts["service.name"], s) for s in scope.spans]
            self._changed.notify_all()
        return messages.ExportTraceServiceResponse()

    def spans(self) -> list[Received]:
        """All spans so far."""
        with self._changed:
            return list(self._spans)

    def wait_for(self, *names: str, timeout_s: float = 10.0) -> list[Received]:
        """All spans, once each name has arrived."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: set(names) <= {span.name for span in self._spans}, timeout_s
            )
            assert found, f"{names} expected, got {[span.name for span in self._spans]}"
            return list(self._spans)


def _received(service: str, span: Any) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes={item.key: _value(item.value) for item in span.attributes},
        events=[
            (event.name, {item.key: _value(item.value) for item in event.attributes})
            for event in span.events
        ],
        is_error=span.status.code == 2,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """A receiver on a free port of loopback."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    services.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    receiver.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()
