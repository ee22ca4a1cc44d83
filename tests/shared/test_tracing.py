import os
import subprocess
import sys

import pytest

from shared import tracing
from shared.errors import ConfigError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_off_records_nothing_and_passes_the_callers_context_on() -> None:
    assert not tracing.is_enabled()
    with tracing.start_span("Submit", traceparent=PARENT, attributes={"n": 1}) as span:
        span.set("x", 1)
        span.fail("why")
        assert span.traceparent == PARENT
        assert tracing.current_traceparent() == ""
    span.end()
    assert tracing.start_span("root").traceparent == ""


def test_off_imports_no_opentelemetry() -> None:
    code = (
        "import sys; from shared import tracing; tracing.configure('x');"
        "tracing.start_span('a', traceparent='b').end();"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    environment = {name: value for name, value in os.environ.items() if "OTEL" not in name}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=30)


def test_a_wrong_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nothing-known")
    with pytest.raises(ConfigError):
        tracing.configure("x")
    assert not tracing.is_enabled()
