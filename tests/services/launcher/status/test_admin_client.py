"""Real processes' doors in this process: admin and health servers that say what a test wants."""

import asyncio
import dataclasses
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from protos.glm.v1 import admin_pb2_grpc
from services.launcher.run_dir import Failing
from services.launcher.status import admin_client
from services.launcher.status.admin_client import ask, ask_all
from services.launcher.status.mesh import Target
from shared.admin import AdminStatus, ReplicaStatus, start_admin
from shared.config import ServiceSettings
from shared.errors import ConfigError
from shared.health import HealthThread
from shared.rpc import build_server
from shared.sampling import ReplicaLoad


class Settings(ServiceSettings):
    """Of the process that is asked."""

    service: ClassVar[str] = "scheduler"


# Against hanging, not about speed.
LIMIT_S = 60.0
# Above the largest that Linux gives.
NO_PID = 2**22 + 1
Serve = Callable[..., object]


@pytest.fixture(autouse=True)
def _patient_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this process takes to connect to a health server that is there."""
    probe = admin_client.probe

    async def patient(address: str, *, timeout_s: float) -> str:
        while (answer := await probe(address, timeout_s=timeout_s)) == "UNREACHABLE":
            pass
        return answer

    monkeypatch.setattr(admin_client, "probe", patient)


class Silent(admin_pb2_grpc.AdminServiceServicer):
    """Takes a question and never answers it."""

    async def GetStatus(self, request: object, context: object) -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[[AdminStatus], object]]:
    """Start a process's doors; returns where they are."""
    async with AsyncExitStack() as stack:

        async def start(status: AdminStatus, *, is_serving: bool = True) -> Target:
            admin, health = f"unix:{tmp_path}/a", f"unix:{tmp_path}/h"
            server = await start_admin(
                admin,
                "scheduler",
                lambda: status,
                lambda: None,
                Settings(address="h:1"),
                instance_id="this run",
            )
            stack.push_async_callback(server.stop, 0)
            thread = HealthThread(address=health, service="x")
            thread.start()
            stack.callback(thread.stop)
            thread.set_status(is_serving, "no worker")
            return Target(name="scheduler", admin_address=admin, health_address=health, pid=5)

        yield start


async def test_a_row_says_what_the_process_says(serve: Serve) -> None:
    load = ReplicaLoad(
        is_ready=True,
        num_running=2,
        num_waiting=1,
        num_free_blocks=7,
        num_total_blocks=9,
        num_steps_total=55,
        num_cached_blocks=3,
    )
    replicas = [ReplicaStatus(load=load, last_step_age_ms=12), ReplicaStatus(load=ReplicaLoad())]
    target = await serve(AdminStatus(num_live=3, replicas=replicas))  # type: ignore[misc]
    row = await ask(target, LIMIT_S)
    assert (row.name, row.service, row.state, row.pid) == ("scheduler", "scheduler", "ready", 5)
    assert (row.num_live, row.instance_id, row.last_step_age_ms) == (3, "this run", None)
    assert row.version
    first, second = row.replicas
    assert (first.replica, first.state, first.num_running, first.num_waiting) == (0, "ready", 2, 1)
    assert (first.num_free_blocks, first.num_total_blocks, first.num_cached_blocks) == (7, 9, 3)
    assert (first.num_steps_total, first.last_step_age_ms) == (55, 12)
    assert (second.replica, second.state) == (1, "lost")
    assert not row.is_ready


@pytest.mark.parametrize(
    ("status", "is_serving", "state", "reason"),
    [
        (AdminStatus(), True, "ready", ""),
        (AdminStatus(not_serving_reason="no worker"), False, "getting ready", "no worker"),
        # The event loop stands still: only health knows.
        (AdminStatus(), False, "getting ready", "health says NOT_SERVING"),
        (AdminStatus(is_draining=True, not_serving_reason="draining"), False, "draining", ""),
    ],
)
async def test_the_state_is_that_of_admin_and_health_together(
    serve: Serve, status: AdminStatus, is_serving: bool, state: str, reason: str
) -> None:
    target = await serve(status, is_serving=is_serving)  # type: ignore[misc]
    row = await ask(target, LIMIT_S)
    assert (row.state, row.reason) == (state, reason)


async def test_without_a_health_address_the_admin_service_tells(serve: Serve) -> None:
    target = await serve(AdminStatus(), is_serving=False)  # type: ignore[misc]
    row = await ask(Target(name="unix:/x", admin_address=target.admin_address), LIMIT_S)
    assert (row.name, row.state) == ("scheduler unix:/x", "ready")


async def test_a_process_that_is_gone_or_silent_is_away_and_holds_up_nobody(tmp_path: Path) -> None:
    gone = Target(name="worker.1", admin_address=f"unix:{tmp_path}/no", pid=NO_PID)
    quiet = Target(name="frontend-1", admin_address=f"unix:{tmp_path}/s", pid=7)
    server = build_server(address=f"unix:{tmp_path}/s")
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Silent(), server)
    await server.start()
    async with asyncio.timeout(30):
        rows = await ask_all([gone, quiet], 3.0)
    await server.stop(0)
    assert [(row.service, row.state) for row in rows] == [("worker", "away"), ("frontend", "away")]
    assert rows[0].reason == "not reached: UNAVAILABLE"
    assert rows[1].reason == "no answer within 3 s"


async def test_a_frozen_process_gave_no_answer_and_is_not_one_that_is_gone(tmp_path: Path) -> None:
    """Its kernel takes connections: what makes a channel is never said."""
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(f"{tmp_path}/f")
        frozen.listen()
        target = Target(name="scheduler", admin_address=f"unix:{tmp_path}/f", pid=os.getpid())
        # Longer than a channel waits for a peer's first words before it is called unreachable.
        row = await ask(target, 2.0)
    assert (row.state, row.reason) == ("away", "no answer within 2 s")
    unheard = dataclasses.replace(target, admin_address=f"unix:{tmp_path}/none")
    assert (await ask(unheard, 0.3)).reason == "no answer within 0.3 s"


async def test_a_process_that_keeps_ending_says_so_whether_it_is_there_or_not(
    serve: Serve, tmp_path: Path
) -> None:
    failing = Failing(num_failures=6, next_start_at=time.time() + 20)
    told = r"keeps ending \(6 times in a row\), next start in \d+ s"
    here = dataclasses.replace(await serve(AdminStatus()), failing=failing)  # type: ignore[misc]
    row = await ask(here, LIMIT_S)
    assert re.fullmatch(told, row.reason)
    assert row.is_ready
    gone = Target(name="scheduler", admin_address=f"unix:{tmp_path}/no", failing=failing)
    assert re.fullmatch(f"not reached: UNAVAILABLE; {told}", (await ask(gone, LIMIT_S)).reason)
    led = Target(name="worker.1", pid=NO_PID, failing=failing)
    assert re.fullmatch(f"ended; {told}", (await ask(led, LIMIT_S)).reason)


async def test_a_led_rank_is_seen_by_its_process_alone() -> None:
    rows = await ask_all(
        [Target(name="worker.1", pid=os.getpid()), Target(name="worker.2", pid=NO_PID)], LIMIT_S
    )
    assert [(row.state, row.is_ready) for row in rows] == [("led", True), ("away", False)]


async def test_what_is_no_address_is_named() -> None:
    with pytest.raises(ConfigError, match="--admin-address nowhere"):
        await ask(Target(name="x", admin_address="nowhere"), 1.0)
