import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from protos.glm.v1 import admin_pb2, admin_pb2_grpc
from services.detokenizer.__main__ import main
from shared.errors import FailureReason
from shared.health import probe
from shared.rpc import open_channel
from tests.services.detokenizer.conftest import LIMIT_S, NANO, Mesh
from tests.services.detokenizer.test_server import content_of


async def test_it_serves_exactly_while_the_scheduler_is_reached(mesh: Mesh) -> None:
    address = str(mesh.settings.health_address)

    async def until(status: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await probe(address) != status:  # noqa: ASYNC110  # another process changes it
                await asyncio.sleep(0.02)

    await until("SERVING")
    await mesh.scheduler_server.stop(0)
    await until("NOT_SERVING")
    await mesh.start_scheduler()
    await until("SERVING")


async def test_operators_and_frontends_are_told_the_same_name_of_the_run(mesh: Mesh) -> None:
    frontend = mesh.connect()
    await frontend.read_until(lambda: frontend.load is not None)
    async with open_channel(str(mesh.settings.admin_address)) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
    assert frontend.load is not None
    assert status.instance_id == frontend.load.instance_id != ""
    frontend.call.cancel()


async def test_a_drain_refuses_newcomers_and_lets_running_requests_end(mesh: Mesh) -> None:
    mesh.scheduler.pause_s, mesh.scheduler.max_sent = 0.005, 10
    frontend = mesh.connect()
    text = "word " * 40
    await frontend.submit((1, mesh.submit(text, is_stream=True)))
    await frontend.read_until(lambda: bool(frontend.answers[1].data))
    async with open_channel(str(mesh.settings.admin_address)) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        assert (await stub.Drain(admin_pb2.DrainRequest(), timeout=30)).num_live == 1
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
    assert (status.service, status.is_draining, status.num_live) == ("detokenizer", True, 1)
    await frontend.read_until(lambda: frontend.is_told_of_drain)
    late = mesh.connect()
    await late.read_until(lambda: late.is_told_of_drain)
    late.call.cancel()
    await frontend.submit((2, mesh.submit("a")))
    mesh.scheduler.max_sent = None
    await frontend.read_until_over(1, 2)
    verdict = frontend.answers[2].verdict
    assert verdict is not None
    assert verdict.refusal.reason == FailureReason.DRAINING
    assert content_of(frontend.answers[1].data) == text
    frontend.call.cancel()


async def test_what_a_drain_does_not_finish_gets_an_end_before_the_socket_closes(
    mesh: Mesh,
) -> None:
    mesh.scheduler.pause_s = 0.005
    frontend = mesh.connect()
    await frontend.submit((1, mesh.submit("x " * 5000, is_stream=True)))
    await frontend.read_until(lambda: bool(frontend.answers[1].data))
    mesh.stop.set()
    await frontend.read_until_over(1)
    end = frontend.answers[1].end
    assert end is not None
    assert end.failed.reason == FailureReason.DRAINING
    frontend.call.cancel()


@pytest.mark.parametrize("model", ["/nowhere", "tests"])
def test_a_wrong_checkpoint_is_one_clear_line_and_code_2(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--address", f"unix:{tmp_path}/d", "--scheduler-address", f"unix:{tmp_path}/s"]
    assert main([*flags, "--model", model]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "tokenizer.json" in error


def test_the_process_imports_no_other_service_and_no_torch() -> None:
    code = (
        "import sys, json, services.detokenizer.__main__;"
        "print(json.dumps([name for name in sys.modules]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=NANO.parents[1],
    ).stdout
    loaded = set(json.loads(out))
    assert not {"torch", "transformers", "services.scheduler", "services.frontend"} & loaded
