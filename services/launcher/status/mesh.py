"""What a running mesh is: the values that `glm-mesh status` gathers, and what "ready" means.

Law: a mesh is ready when every process of it answers and is ready, and so is every replica. What
drains, or is drained, is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.launcher.restarts import WINDOW_S
from services.launcher.run_dir import Failing

READY, DRAINING, AWAY, LED = "ready", "draining", "away", "led"
"""States of processes, beside "getting ready"; a led rank is ready with the one that leads it."""
GETTING_READY = "getting ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process to ask.

    Attributes:
        name: What it is called.
        admin_address: Where it answers operators; None for a rank that another one leads.
        health_address: Where it tells its health; None where nobody said.
        pid: Its process id; 0 where nobody said.
        failing: Whether the launcher has seen it end again and again.
    """

    name: str
    admin_address: str | None = None
    health_address: str | None = None
    pid: int = 0
    failing: Failing | None = None


def failing_told(failing: Failing | None, now: float) -> str:
    """A process that keeps ending in words; empty once it has stayed as long as is forgiven.

    Args:
        failing: What the launcher wrote.
        now: Seconds since the epoch.
    """
    if failing is None or now >= failing.next_start_at + WINDOW_S:
        return ""
    wait_s = failing.next_start_at - now
    when = f"next start in {wait_s:.0f} s" if wait_s > 0 else f"last start {-wait_s:.0f} s ago"
    return f"keeps ending ({failing.num_failures} times in a row), {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One worker group of a scheduler."""

    replica: int
    state: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    num_cached_blocks: int
    num_steps_total: int
    last_step_age_ms: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes sequences."""
        return self.state == READY


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process; `num_live` are requests, sequences or rows that have not ended."""

    name: str
    service: str
    state: str
    reason: str = ""
    pid: int = 0
    version: str = ""
    instance_id: str = ""
    uptime_ms: int = 0
    num_live: int = 0
    last_step_age_ms: int | None = None
    replicas: Sequence[ReplicaRow] = ()

    @property
    def is_ready(self) -> bool:
        """Whether it does its work, with all its replicas."""
        return self.state in {READY, LED} and all(row.is_ready for row in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshStatus:
    """All of it; `url` is empty where nobody said."""

    rows: Sequence[ProcessRow] = field(default_factory=tuple)
    url: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether everything does its work."""
        return all(row.is_ready for row in self.rows)
