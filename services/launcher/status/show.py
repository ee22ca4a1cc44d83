"""The status of a mesh as a table for people and as JSON for programs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from services.launcher.status.mesh import READY, MeshStatus, ProcessRow, ReplicaRow

_HEAD: Final = (
    *("NAME", "STATE", "LIVE", "RUNNING", "WAITING", "FREE/BLOCKS", "CACHED", "STEPS"),
    *("LAST STEP", "UP", "INSTANCE"),
)
# Enough to tell two runs apart.
_INSTANCE_CHARS: Final = 8


def as_json(status: MeshStatus) -> dict[str, Any]:
    """Everything; `is_ready` of a row includes its replicas."""
    return {
        "is_ready": status.is_ready,
        "url": status.url,
        "processes": [{**dataclasses.asdict(row), "is_ready": row.is_ready} for row in status.rows],
    }


def as_table(status: MeshStatus) -> list[str]:
    """A line per process and, below its scheduler, per replica; then what is not ready."""
    rows: list[Sequence[str]] = [_HEAD]
    for row in status.rows:
        rows.append(_process(row))
        rows += [_replica(replica) for replica in row.replicas]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    reasons = [f"{row.name}: {row.reason}" for row in status.rows if row.reason]
    return [*lines, *reasons, _verdict(status)]


def _verdict(status: MeshStatus) -> str:
    where = f" at {status.url}" if status.url else ""
    if status.is_ready:
        return f"ready{where}"
    late = [name for row in status.rows if not row.is_ready for name in _late(row)]
    return f"not ready{where}: {', '.join(late)}"


def _late(row: ProcessRow) -> list[str]:
    """A process that is not ready, or those of its replicas that are not."""
    if row.state != READY:
        return [f"{row.name} {row.state}"]
    return [f"replica {r.replica} of {row.name} {r.state}" for r in row.replicas if not r.is_ready]


def _process(row: ProcessRow) -> Sequence[str]:
    is_known = bool(row.instance_id)
    return (
        row.name,
        row.state,
        str(row.num_live) if is_known else "",
        *("", "", "", "", ""),
        _age(row.last_step_age_ms),
        _age(row.uptime_ms) if is_known else "",
        row.instance_id[:_INSTANCE_CHARS],
    )


def _replica(row: ReplicaRow) -> Sequence[str]:
    return (
        f"  replica {row.replica}",
        row.state,
        "",
        str(row.num_running),
        str(row.num_waiting),
        f"{row.num_free_blocks}/{row.num_total_blocks}",
        str(row.num_cached_blocks),
        str(row.num_steps_total),
        _age(row.last_step_age_ms),
        *("", ""),
    )


def _age(milliseconds: int | None) -> str:
    if milliseconds is None:
        return ""
    seconds = milliseconds / 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.1f}s"
