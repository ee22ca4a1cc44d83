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
from shared.admin import AdminStatus, start_admin
from shared.config import ServiceSettings
from shared.errors import FailureReason
from shared.rpc import error_from_rpc, open_channel


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
        yield channel
    await server.stop(0)


async def test_status_shows_state_and_settings_without_secrets(channel: grpc.aio.Channel) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=5)
    settings = {setting.name: setting.value for setting in status.settings}
    assert (status.service, status.num_live, status.last_step_age_ms) == ("worker", 3, 7)
    assert status.version
    assert settings["address"] == "h:1"
    assert settings["api_key"] == "***"
    assert "hunter2" not in str(status)


async def test_tasks_that_are_left_behind_are_counted(channel: grpc.aio.Channel) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    before = (await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=5)).num_tasks
    left = [asyncio.create_task(asyncio.Event().wait()) for _ in range(20)]
    after = (await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=5)).num_tasks
    # gRPC has some of its own, which come and go.
    assert 15 <= after - before <= 25
    for task in left:
        task.cancel()


async def test_drain_is_passed_on_and_may_be_repeated(channel: grpc.aio.Channel) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    for _ in range(2):
        answer = await stub.Drain(admin_pb2.DrainRequest(), timeout=5)
        assert answer.num_live == 3
    status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=5)
    assert status.is_draining


async def test_log_level_changes_and_an_unknown_one_is_refused(channel: grpc.aio.Channel) -> None:
    stub, root = admin_pb2_grpc.AdminServiceStub(channel), logging.getLogger("services")
    before = root.level
    try:
        await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="DEBUG"), timeout=5)
        assert root.level == logging.DEBUG
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level="LOUD"), timeout=5)
    finally:
        root.setLevel(before)
    error = error_from_rpc(failure.value)
    assert (error.reason, error.field) == (FailureReason.INVALID_ARGUMENT, "level")


async def test_reflection_lists_the_services_of_the_process(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]), timeout=5)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"glm.v1.AdminService", "glm.v1.WorkerService"} <= names
