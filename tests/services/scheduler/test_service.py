"""One scheduler process: health, admin, drain, stop."""

import asyncio

import grpc.aio
import pytest

from protos.glm.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from services.scheduler.service import SchedulerService
from shared import sides
from shared.errors import ConfigError
from shared.rpc import open_channel
from tests.services.scheduler.conftest import LIMIT_S, Running, expected, sequence, submit


async def test_health_follows_the_worker(running: Running) -> None:
    await running.start(with_worker=False)
    await running.wait_for_health("NOT_SERVING")
    await running.start_worker()
    await running.wait_for_health("SERVING")
    await running.wait_for_health("SERVING", "glm.v1.SchedulerService")
    await running.kill_worker()
    await running.wait_for_health("NOT_SERVING")


async def test_operators_see_state_and_settings(running: Running) -> None:
    await running.start()
    peer = running.peer()
    await peer.submit(submit("a", sequence(0)))
    await peer.read_until_ended(0)
    # After eight tokens comes a step that tells the worker which row has ended.
    await running.wait_for_load(lambda load: load.num_steps_total == 9)
    async with open_channel(running.admin_address) as channel:
        await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
        assert status.service == "scheduler"
        assert status.not_serving_reason == ""
        assert status.num_live == 0
        assert status.last_step_age_ms < 5000
        assert [(row.state, row.load.num_running) for row in status.replicas] == [("ready", 0)]
        assert status.replicas[0].load.num_steps_total == 9
        assert status.replicas[0].last_step_age_ms < 5000
        with pytest.raises(grpc.aio.AioRpcError, match="replica 0 is the last that takes"):
            await stub.DrainReplica(admin_pb2.DrainReplicaRequest(is_draining=True), timeout=30)
        assert {s.name for s in status.settings} >= {"worker_address", "max_plans_in_flight"}
        await running.kill_worker()
        await running.wait_for_health("NOT_SERVING")
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
        assert status.not_serving_reason.startswith("no worker: ")
        assert status.not_serving_reason.endswith("last step 9")
        assert [row.state for row in status.replicas] == ["lost"]


async def test_a_drained_scheduler_refuses_and_ends_what_runs(running: Running) -> None:
    await running.start()
    running.worker.step_s = 0.01
    peer = running.peer()
    await peer.submit(submit("a", sequence(0), max_tokens=30))
    await peer.read_until_tokens(0, 1)
    running.worker.gate.clear()
    async with open_channel(running.admin_address) as channel:
        await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        answer = await stub.Drain(admin_pb2.DrainRequest(), timeout=30)
        assert answer.num_live == 1
    running.worker.gate.set()
    await running.wait_for_health("NOT_SERVING")
    await peer.submit(submit("b", sequence(1)))
    await peer.read_until_ended(0, 1)
    assert peer.received[0].tokens == expected(0, 5, 30)
    assert peer.received[1].verdict.refusal.reason == common_pb2.FAILURE_REASON_DRAINING


async def test_stopping_lets_running_requests_end(running: Running) -> None:
    await running.start()
    running.worker.step_s = 0.01
    peer = running.peer()
    await peer.submit(submit("a", sequence(0), max_tokens=30))
    await peer.read_until_tokens(0, 1)
    running.stop.set()
    await peer.read_until_ended(0)
    assert peer.received[0].tokens == expected(0, 5, 30)
    with pytest.raises((grpc.aio.AioRpcError, EOFError)):
        await peer.read_for_ever()


async def test_what_outlasts_the_drain_limit_gets_a_failed_end(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "SERVER_GRACE_S", LIMIT_S)
    await running.start(drain_timeout_s=0.1)
    running.worker.gate.clear()
    peer = running.peer()
    await peer.submit(submit("a", sequence(0)))
    await asyncio.wait_for(running.worker.plan_seen.wait(), LIMIT_S)
    running.stop.set()
    await peer.read_until_ended(0)
    end = peer.received[0].end
    assert end is not None
    assert end.failed.reason == common_pb2.FAILURE_REASON_DRAINING


async def test_a_second_scheduler_on_the_address_does_not_start(running: Running) -> None:
    await running.start()
    assert running.service is not None
    second = SchedulerService(running.service._settings)
    with pytest.raises(ConfigError, match="in use"):
        await second.run(asyncio.Event())
