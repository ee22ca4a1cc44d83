"""Real processes of one replica: the leader serves, the follower follows, both end together."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.worker.__main__ import EXIT_WORLD_LOST
from services.worker.server import SERVICE_NAME
from shared.health import probe
from shared.process import EXIT_USAGE
from shared.rpc import open_channel
from tests.services.worker.plans import Entry, make_plan, make_sequence
from tests.services.worker.scheduler_client import SchedulerClient, ids_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Any]) -> Path:
    path: Path = make_checkpoint().path
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short paths: a socket's name holds 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class Replica:
    """The processes of a replica of two."""

    def __init__(self, folder: Path, checkpoint: Path, *flags: list[str]) -> None:
        self.folder = folder
        self.processes = [
            self._start(rank, checkpoint, flags[rank] if flags else []) for rank in range(2)
        ]

    def _start(self, rank: int, checkpoint: Path, flags: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "services.worker"]
        command += ["--address", f"unix:{self.folder}/w.sock", "--model", str(checkpoint)]
        command += ["--health-address", f"unix:{self.folder}/h{rank}.sock"]
        command += ["--tensor-parallel-size", "2", "--rank", str(rank), "--num-threads", "1"]
        command += ["--rendezvous", f"file://{self.folder}/meeting", "--num-kv-blocks", "8"]
        command += ["--max-num-seqs", "4", "--stall-timeout-s", "20", "--check-rows", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(self.folder / f"log{rank}", "w", encoding="utf-8") as log:
            return subprocess.Popen(command, cwd=ROOT, stderr=log, env=environment, text=True)

    async def until(self, rank: int, status: str, limit_s: float = 60) -> None:
        async with asyncio.timeout(limit_s):
            address = f"unix:{self.folder}/h{rank}.sock"
            while await probe(address, service=SERVICE_NAME) != status:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def codes(self, limit_s: float = 60) -> list[int]:
        """How the processes end."""
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < deadline, "a process goes on"
            await asyncio.sleep(0.05)
        return [process.returncode for process in self.processes]

    def said(self, rank: int) -> str:
        return (self.folder / f"log{rank}").read_text()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def serving(folder: Path, checkpoint: Path) -> AsyncIterator[tuple[Replica, SchedulerClient]]:
    replica = Replica(folder, checkpoint)
    try:
        await replica.until(0, "SERVING")
        await replica.until(1, "SERVING")
        async with open_channel(f"unix:{folder}/w.sock") as channel:
            client = SchedulerClient(channel)
            await client.open(1)
            yield replica, client
    finally:
        replica.end()


def first_plan() -> Any:
    new = make_sequence(0, [5, 6, 7], max_tokens=50, ignore_eos=True)
    return make_plan(1, {0: Entry(scheduled=3, blocks=(1,))}, new=[new])


async def test_a_replica_of_two_serves_and_stops_in_order(folder: Path, checkpoint: Path) -> None:
    async with serving(folder, checkpoint) as (replica, client):
        assert len(ids_of(await client.run(first_plan()))) == 1
        again = await client.run(make_plan(2, {0: Entry(computed=3)}))
        assert len(ids_of(again)) == 1
        for process in replica.processes:
            process.send_signal(signal.SIGTERM)
        assert await replica.codes() == [0, 0]


async def test_a_killed_follower_ends_the_epoch_with_its_name_and_the_leader_too(
    folder: Path, checkpoint: Path
) -> None:
    async with serving(folder, checkpoint) as (replica, client):
        await client.run(first_plan())
        replica.processes[1].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.result()
        assert "rank 1: its process ended" in str(caught.value.details())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await replica.codes() == [EXIT_WORLD_LOST, -signal.SIGKILL]
        assert "worker: rank 1: its process ended" in replica.said(0)


async def test_a_killed_leader_ends_its_follower(folder: Path, checkpoint: Path) -> None:
    async with serving(folder, checkpoint) as (replica, _):
        replica.processes[0].kill()
        assert await replica.codes() == [-signal.SIGKILL, EXIT_WORLD_LOST]
        assert "worker: rank 0: its process ended" in replica.said(1)


async def test_ranks_with_other_settings_do_not_start(folder: Path, checkpoint: Path) -> None:
    replica = Replica(folder, checkpoint, [], ["--max-num-batched-tokens", "100"])
    try:
        assert await replica.codes() == [EXIT_USAGE, EXIT_USAGE]
    finally:
        replica.end()
    for rank in range(2):
        said = "max_num_batched_tokens is 2048 on rank 0 and something else on rank 1"
        assert said in replica.said(rank)
