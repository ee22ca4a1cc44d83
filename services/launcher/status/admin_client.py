"""Asks processes how they are: AdminService for the state, grpc.health.v1 for readiness."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import grpc.aio

from protos.glm.v1 import admin_pb2, admin_pb2_grpc
from services.launcher.commands import kind_of
from services.launcher.status.mesh import (
    AWAY,
    DRAINING,
    GETTING_READY,
    LED,
    READY,
    ProcessRow,
    ReplicaRow,
    Target,
    failing_told,
)
from shared.errors import ConfigError
from shared.health import probe
from shared.parent import is_alive
from shared.rpc import open_channel


async def ask_all(targets: Sequence[Target], timeout_s: float) -> list[ProcessRow]:
    """A row for each process, in order; all are asked at once."""
    return list(await asyncio.gather(*(ask(target, timeout_s) for target in targets)))


async def ask(target: Target, timeout_s: float) -> ProcessRow:
    """The row of one process; one that does not answer in time is away.

    Raises:
        ConfigError: The address is none.
    """
    row = await _ask(target, timeout_s)
    if told := failing_told(target.failing, time.time()):
        reason = f"{row.reason}; {told}" if row.reason else told
        return dataclasses.replace(row, reason=reason)
    return row


async def _ask(target: Target, timeout_s: float) -> ProcessRow:
    if target.admin_address is None:
        return _led(target)
    is_there = target.pid > 0 and is_alive(target.pid)
    try:
        status, health = await asyncio.gather(
            _status(target.admin_address, timeout_s, is_there=is_there), _health(target, timeout_s)
        )
    except ValueError as error:
        raise ConfigError(f"--admin-address {target.admin_address}: {error}") from None
    if isinstance(status, str):
        kind = kind_of(target.name) if target.pid else ""
        return ProcessRow(name=target.name, service=kind, state=AWAY, reason=status, pid=target.pid)
    return _row(target, status, health)


async def _status(
    address: str, timeout_s: float, *, is_there: bool
) -> admin_pb2.GetStatusResponse | str:
    """What AdminService says, or why nothing; a process that lives is given the whole time."""
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            answer: admin_pb2.GetStatusResponse = await stub.GetStatus(
                admin_pb2.GetStatusRequest(), timeout=timeout_s, wait_for_ready=is_there
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {timeout_s:g} s"
            return f"not reached: {error.code().name}"
    return answer


async def _health(target: Target, timeout_s: float) -> str:
    """Empty where nobody said whom to ask: then the state tells."""
    if target.health_address is None:
        return ""
    return await probe(target.health_address, timeout_s=timeout_s)


def _row(target: Target, status: admin_pb2.GetStatusResponse, health: str) -> ProcessRow:
    state, reason = READY, status.not_serving_reason
    if status.is_draining:
        state = DRAINING
    elif reason or health not in {"", "SERVING"}:
        state, reason = GETTING_READY, reason or f"health says {health}"
    name = target.name if target.pid else f"{status.service} {target.name}"
    return ProcessRow(
        name=name,
        service=status.service,
        state=state,
        reason=reason if state != DRAINING else "",
        pid=target.pid,
        version=status.version,
        instance_id=status.instance_id,
        uptime_ms=status.uptime_ms,
        num_live=status.num_live,
        last_step_age_ms=_given(status),
        replicas=[_replica(entry) for entry in status.replicas],
    )


def _replica(entry: admin_pb2.ReplicaStatus) -> ReplicaRow:
    load = entry.load
    return ReplicaRow(
        replica=entry.replica,
        state=entry.state,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_total_blocks=load.num_total_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_steps_total=load.num_steps_total,
        last_step_age_ms=_given(entry),
    )


def _given(message: admin_pb2.GetStatusResponse | admin_pb2.ReplicaStatus) -> int | None:
    return message.last_step_age_ms if message.HasField("last_step_age_ms") else None


def _led(target: Target) -> ProcessRow:
    """A rank without a door of its own: that it lives is all that can be seen."""
    if not is_alive(target.pid):
        return ProcessRow(
            name=target.name, service="worker", state=AWAY, reason="ended", pid=target.pid
        )
    return ProcessRow(name=target.name, service="worker", state=LED, pid=target.pid)
