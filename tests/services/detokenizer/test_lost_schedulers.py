"""Schedulers behind real channels that end, stop or stand still while requests run."""

import asyncio
import json
from typing import Any

import pytest

from shared.errors import FailureReason
from tests.services.detokenizer.conftest import Mesh
from tests.services.detokenizer.test_server import content_of

TEXT = "word " * 60
TWO = {"schedulers": ["s", "s2"]}


async def streams(mesh: Mesh, count: int = 4, **fields: Any) -> Any:
    """A frontend with requests that have begun, and do not end before `lose`."""
    for fake in (mesh.scheduler, mesh.second):
        fake.pause_s, fake.max_sent = 0.005, 10
    frontend = mesh.connect()
    submits = ((i, mesh.submit(TEXT, is_stream=True, **fields)) for i in range(count))
    await frontend.submit(*submits)
    await frontend.read_until(lambda: all(frontend.answers[i].data for i in range(count)))
    return frontend


async def lose(mesh: Mesh) -> None:
    """End the scheduler under its sequences; what goes on somewhere comes to its end."""
    await mesh.scheduler_server.stop(0)
    mesh.scheduler_server = None
    for fake in (mesh.scheduler, mesh.second):
        fake.max_sent = None


def check_whole(frontend: Any, count: int = 4) -> None:
    for number in range(count):
        answer = frontend.answers[number]
        assert not answer.end.HasField("failed"), answer.end.failed
        assert content_of(answer.data) == TEXT


@pytest.mark.parametrize("mesh_settings", [dict(TWO)], ids=["two"])
async def test_streams_of_a_lost_scheduler_go_on_at_the_other(mesh: Mesh) -> None:
    for fake in (mesh.scheduler, mesh.second):
        fake.load = {"max_num_seqs": 1}
    await mesh.start_second()
    await mesh.until(lambda: bool(mesh.second.num_connections))
    await mesh.until(lambda: all(peer.is_ready for peer in mesh.schedulers.peers))
    frontend = await streams(mesh)
    assert mesh.scheduler.running
    assert mesh.second.running, "four of one prompt are above the bound"
    await lose(mesh)
    await frontend.read_until_over(*range(4))
    check_whole(frontend)
    assert frontend.load is not None
    assert frontend.load.num_scheduler_losses_total == 1
    assert frontend.load.num_resubmissions_total > 0
    assert (frontend.load.num_schedulers, frontend.load.num_reached_schedulers) == (2, 1)
    frontend.call.cancel()


async def test_streams_wait_for_the_only_scheduler_and_go_on(mesh: Mesh) -> None:
    frontend = await streams(mesh, include_usage=True)
    await lose(mesh)
    await mesh.until(lambda: mesh.schedulers.num_waiting == 4)
    await asyncio.sleep(0.3)
    await mesh.start_scheduler()
    await frontend.read_until_over(*range(4))
    check_whole(frontend)
    usage = json.loads(frontend.answers[0].data.split(b"data: ")[-2])["usage"]
    assert usage["prompt_tokens"] == 2
    script = mesh.dialect.encode(TEXT, allow_control=True)
    assert usage["completion_tokens"] == len(script) + 1
    frontend.call.cancel()


async def test_a_stop_string_across_the_gap_is_found(mesh: Mesh) -> None:
    mesh.scheduler.pause_s = 0.005
    frontend = mesh.connect()
    text = "abc " * 30 + "the end" + " more" * 30
    count = len(mesh.dialect.encode("abc " * 30 + "the", allow_control=True))
    mesh.scheduler.max_sent = count
    await frontend.submit((0, mesh.submit(text, is_stream=True, stop=["the end"])))
    await mesh.until(lambda: [r.num_sent for r in mesh.scheduler.running.values()] == [count])
    # What comes later on the scheduler's stream is read later: then half of the stop is in there.
    await frontend.submit((1, mesh.submit("later")))
    await frontend.read_until_over(1)
    await lose(mesh)
    await mesh.start_scheduler()
    await frontend.read_until_over(0)
    assert content_of(frontend.answers[0].data) == "abc " * 30
    frontend.call.cancel()


@pytest.mark.parametrize("mesh_settings", [{"resume_timeout_s": 0.3}], ids=["0.3 s"])
async def test_past_the_bound_streams_end_with_the_error_of_a_lost_scheduler(mesh: Mesh) -> None:
    frontend = await streams(mesh)
    await lose(mesh)
    async with asyncio.timeout(15.0):  # of the 30 s that streams wait by default
        await frontend.read_until_over(*range(4))
    for answer in frontend.answers.values():
        assert answer.end.failed.reason == FailureReason.UPSTREAM_LOST
        assert answer.end.failed.is_retryable
        assert answer.end.failed.retry_after_ms
    frontend.call.cancel()


async def test_an_abort_in_the_gap_leaves_nothing(mesh: Mesh) -> None:
    frontend = await streams(mesh)
    await lose(mesh)
    await mesh.until(lambda: mesh.schedulers.num_waiting == 4)
    await frontend.abort(*range(4))
    await mesh.until(lambda: not mesh.schedulers._tracks)
    await mesh.start_scheduler()
    await mesh.until_connected(2)
    await mesh.until(lambda: not mesh.schedulers.num_waiting)
    assert len(mesh.scheduler.submits) == 4
    frontend.call.cancel()


@pytest.mark.parametrize("mesh_settings", [{"silence_timeout_s": 1.5}], ids=["1.5 s"])
async def test_a_scheduler_that_stands_still_is_left_for_another_connection(mesh: Mesh) -> None:
    """It says that it gives signs of life, and gives none: it is silent whenever nothing runs."""
    mesh.scheduler.load = {"instance_id": "i"}
    mesh.scheduler.is_manual = True
    await mesh.scheduler_server.stop(0)
    await mesh.start_scheduler()
    await mesh.until_connected(2)
    frontend = mesh.connect()
    await frontend.submit((0, mesh.submit("text", is_stream=True)))
    await mesh.until(lambda: bool(mesh.scheduler.submits))
    mesh.scheduler.is_manual = False
    await frontend.read_until_over(0)
    assert content_of(frontend.answers[0].data) == "text"
    assert mesh.scheduler.num_connections >= 3
    frontend.call.cancel()
