"""What the standard OTEL_* variables ask for, read without importing OpenTelemetry."""

import os
from typing import Final

from shared.errors import ConfigError

KNOWN_EXPORTERS: Final = ("otlp", "console", "none")
# The only transport built in; it is also the variable's default.
KNOWN_PROTOCOL: Final = "grpc"


def exporters_asked_for() -> tuple[str, ...]:
    """Names of the exporters to use; empty means that tracing is off.

    Without OTEL_TRACES_EXPORTER an OTLP endpoint is enough to ask for `otlp`.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    has_endpoint = any(
        os.environ.get(name)
        for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    listed = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if has_endpoint else "none")
    names = [name.strip().lower() for name in listed.split(",") if name.strip()]
    for name in names:
        if name not in KNOWN_EXPORTERS:
            raise ConfigError(
                f"OTEL_TRACES_EXPORTER {name!r}: valid are {', '.join(KNOWN_EXPORTERS)}"
            )
    wanted = tuple(name for name in names if name != "none")
    if "otlp" in wanted:
        _check_protocol()
    return wanted


def _check_protocol() -> None:
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    protocol = os.environ.get(name)
    if not protocol:
        name = "OTEL_EXPORTER_OTLP_PROTOCOL"
        protocol = os.environ.get(name) or KNOWN_PROTOCOL
    if protocol != KNOWN_PROTOCOL:
        raise ConfigError(f"{name} {protocol!r}: only {KNOWN_PROTOCOL!r} is built in")
