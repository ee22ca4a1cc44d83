"""Rows for the tests of `glm-mesh status`."""

from typing import Any

from services.launcher.status.mesh import ProcessRow, ReplicaRow


def replica(number: int = 0, state: str = "ready", **changes: Any) -> ReplicaRow:
    values: dict[str, Any] = {
        "num_running": 3,
        "num_waiting": 1,
        "num_free_blocks": 90,
        "num_total_blocks": 100,
        "num_cached_blocks": 40,
        "num_steps_total": 1234,
    }
    return ReplicaRow(replica=number, state=state, **(values | changes))


def process(name: str = "scheduler", state: str = "ready", **changes: Any) -> ProcessRow:
    values: dict[str, Any] = {
        "service": name,
        "pid": 7,
        "version": "1",
        "instance_id": "abcdef0123456789",
        "uptime_ms": 90_000,
        "num_live": 4,
    }
    return ProcessRow(name=name, state=state, **(values | changes))
