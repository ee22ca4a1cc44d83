import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import Field, SecretStr

from protos.glm.v1 import admin_pb2, admin_pb2_grpc, worker_pb2
from shared.admin import AdminStatus, ReplicaStatus, start_admin
from shared.config import ServiceSettings
from shared.errors import FailureReason
from shared.rpc import error_from_rpc, open_channel
from shared.sampling import ReplicaLoad


class Settings(ServiceSettings):
    """Settings of the service in this test."""

    service: ClassVar[str] = "worker"

    api_key: SecretStr = Field(default=SecretStr("hunter2"), description="A secret.")


class Worker:
    """The service behind the admin door."""

    def __init__(self) -> None:
        self.is_draining = False

    def status(self) -> AdminStatus:
        return AdminStatus(num_live=3, is_draining=self.is_draining, last_step_age_ms=7)

    def drain(self) -> None:
        self.is_draining = True


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    worker, address = Worker(), f"unix:{tmp_path}/a"
    name = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    server = await start_admin(
        address, "worker", worker.status, worker.drain, Settings(address="h:1"), described=(name,)
    )
    async with open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        yield channel
    await server.stop(0)


async def test_status_shows_state_and_settings_without_secrets(channel: grpc.aio.Channel) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
    settings = {setting.name: setting.value for setting in status.settings}
    assert (status.service, status.num_live, status.last_step_age_ms) == ("worker", 3, 7)
    assert status.version
    assert settings["address"] == "h:1"
    assert settings["api_key"] == "***"
    assert "hunter2" not in str(status)


async def test_each_run_of_a_process_has_a_name_of_its_own(tmp_path: Path) -> None:
    worker, names = Worker(), []
    for given in ("", "", "told elsewhere too"):
        address = f"unix:{tmp_path}/{len(names)}"
        server = await start_admin(
            *(address, "worker", worker.status, worker.drain, Settings(address="h:1")),
            instance_id=given,
        )
        async with open_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
        await server.stop(0)
        names.append(status.instance_id)
    assert len(set(names)) == 3
    assert all(names)
    assert names[2] == "told elsewhere too"


async def test_tasks_that_are_left_behind_are_counted(channel: grpc.aio.Channel) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    before = (await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)).num_tasks
    left = [asyncio.create_task(asyncio.Event().wait()) for _ in range(20)]
    after = (await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)).num_tasks
    # gRPC has some of its own, which come and go.
    assert 15 <= after - before <= 25
    for task in left:
        task.cancel()


async def test_drain_is_passed_on_and_may_be_repeated(channel: grpc.aio.Channel) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    for _ in range(2):
        answer = await stub.Drain(admin_pb2.DrainRequest(), timeout=30)
        assert answer.num_live == 3
    status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
    assert status.is_draining


@pytest.mark.parametrize(
    ("load", "state"),
    [
        (ReplicaLoad(), "lost"),
        (ReplicaLoad(is_draining=True), "lost"),
        (ReplicaLoad(is_ready=True), "ready"),
        (ReplicaLoad(is_ready=True, is_draining=True, num_running=1), "draining"),
        (ReplicaLoad(is_ready=True, is_draining=True, num_waiting=1), "draining"),
        (ReplicaLoad(is_ready=True, is_draining=True), "drained"),
    ],
)
def test_the_state_of_a_replica_is_one_word(load: ReplicaLoad, state: str) -> None:
    assert ReplicaStatus(load=load).state == state


async def test_replicas_are_shown_and_drained_by_their_number(tmp_path: Path) -> None:
    asked: list[tuple[int, bool]] = []
    loads = [ReplicaLoad(is_ready=True, num_running=2, num_free_blocks=9), ReplicaLoad()]

    def drain_replica(replica: int, is_draining: bool) -> int:
        asked.append((replica, is_draining))
        return 2

    def status() -> AdminStatus:
        replicas = [ReplicaStatus(load=loads[0], last_step_age_ms=7), ReplicaStatus(load=loads[1])]
        return AdminStatus(replicas=replicas)

    address, settings = f"unix:{tmp_path}/r", Settings(address="h:1")
    server = await start_admin(
        address, "scheduler", status, lambda: None, settings, drain_replica=drain_replica
    )
    async with open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        rows = (await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)).replicas
        assert [(row.replica, row.state) for row in rows] == [(0, "ready"), (1, "lost")]
        assert (rows[0].load.num_running, rows[0].load.num_free_blocks) == (2, 9)
        assert (rows[0].last_step_age_ms, rows[1].HasField("last_step_age_ms")) == (7, False)
        for is_draining in (True, False):
            request = admin_pb2.DrainReplicaRequest(replica=1, is_draining=is_draining)
            assert (await stub.DrainReplica(request, timeout=30)).num_live == 2
    await server.stop(0)
    assert asked == [(1, True), (1, False)]


async def test_a_service_without_replicas_says_so(channel: grpc.aio.Channel) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match="the worker has no replicas") as failure:
        await stub.DrainReplica(admin_pb2.DrainReplicaRequest(), timeout=30)
    assert error_from_rpc(failure.value).field == "replica"


async def test_log_level_changes_and_an_unknown_one_is_refused(channel: grpc.aio.Channel) -> None:
    stub, root = admin_pb2_grpc.AdminServiceStub(channel), logging.getLogger("services")
    before = root.level
    try:
        await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="DEBUG"), timeout=30)
        assert root.level == logging.DEBUG
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="LOUD"), timeout=30)
    finally:
        root.setLevel(before)
    error = error_from_rpc(failure.value)
    assert (error.reason, error.field) == (FailureReason.INVALID_ARGUMENT, "level")


async def test_reflection_lists_the_services_of_the_process(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]), timeout=30)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"glm.v1.AdminService", "glm.v1.WorkerService"} <= names
