"""Bounds of a key over several processes."""

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.frontend import shared_quota
from services.frontend.quota import KeyBounds, Leave
from services.frontend.shared_quota import SharedCounts, SharedQuota
from shared.errors import ConfigError, FailureReason, RequestError
from tests.services.frontend.clocks import at

KEY = bytes(32)
OTHER = bytes([1]) * 32
BOUNDS = KeyBounds(max_concurrent=5)


async def refusal(quota: SharedQuota, now: float = 0.0) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await quota.enter(at(now))
    return caught.value


def key_file(folder: Path) -> Path:
    (path,) = folder.glob("*.key")
    return path


async def fill(quota: SharedQuota) -> list[Leave]:
    """Enter until it is full."""
    leaves: list[Leave] = []
    with contextlib.suppress(RequestError):
        while len(leaves) < 100:
            leaves.append(await quota.enter(at(0.0)))
    return leaves


def race(folder: Path, pipe: Connection, num_tries: int) -> None:
    """In a process of its own: enter and leave, and tell the most that was seen at once."""
    quota = SharedCounts(folder).quota(KEY, BOUNDS)
    pipe.send("there")
    pipe.recv()

    async def run() -> tuple[int, int]:
        most = num_entered = 0
        held: list[Leave] = []
        for number in range(num_tries):
            try:
                held.append(await quota.enter(at(0.0)))
                num_entered += 1
            except RequestError:
                if held:
                    held.pop()()
            most = max(most, quota.num_running)
            if number % 3 == 0 and held:
                held.pop()()
        for leave in held:
            leave()
        return most, num_entered

    pipe.send(asyncio.run(run()))
    pipe.recv()


def hold(folder: Path, pipe: Connection, num: int) -> None:
    """In a process of its own: enter so often, and stay until killed."""
    quota = SharedCounts(folder).quota(KEY, BOUNDS)

    async def run() -> None:
        for _ in range(num):
            await quota.enter(at(0.0))

    asyncio.run(run())
    pipe.send("there")
    time.sleep(60)


@pytest.fixture
def started() -> Iterator[list[BaseProcess]]:
    """Processes that end with the test."""
    processes: list[BaseProcess] = []
    yield processes
    for process in processes:
        process.kill()
        process.join()


def start(processes: list[BaseProcess], work, folder: Path, number: int) -> Connection:  # noqa: ANN001
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(folder, theirs, number), daemon=True)
    process.start()
    processes.append(process)
    assert ours.poll(30)
    assert ours.recv() == "there"
    return ours


def test_two_processes_never_pass_the_bound_and_leave_nothing(
    tmp_path: Path, started: list[BaseProcess]
) -> None:
    pipes = [start(started, race, tmp_path, 3000) for _ in range(2)]
    for pipe in pipes:
        pipe.send("go")
    told = [pipe.recv() for pipe in pipes if pipe.poll(60)]
    assert [most <= 5 and num_entered > 0 for most, num_entered in told] == [True, True]
    quota = SharedCounts(tmp_path).quota(KEY, BOUNDS)
    assert quota.num_running == 0


async def test_a_killed_process_takes_its_places_with_it_and_a_frozen_one_does_not(
    tmp_path: Path, started: list[BaseProcess]
) -> None:
    start(started, hold, tmp_path, 4)
    quota = SharedCounts(tmp_path).quota(KEY, BOUNDS)
    assert len(await fill(quota)) == 1
    (process,) = started
    os.kill(process.pid, signal.SIGSTOP)  # type: ignore[arg-type]  # it runs
    assert (await refusal(quota)).retry_after_ms == 1000
    process.kill()
    process.join()
    assert len(await fill(quota)) == 4
    assert quota.num_running == 5


async def test_who_takes_the_place_of_a_lost_process_starts_from_nothing(tmp_path: Path) -> None:
    first = SharedCounts(tmp_path)
    await fill(first.quota(KEY, BOUNDS))
    first.close()
    second = SharedCounts(tmp_path)
    assert second.row == first.row
    assert len(await fill(second.quota(KEY, BOUNDS))) == 5


async def test_processes_share_a_key_and_keys_share_nothing(tmp_path: Path) -> None:
    one, two = SharedCounts(tmp_path), SharedCounts(tmp_path)
    assert one.row != two.row
    leaves = await fill(one.quota(KEY, BOUNDS))
    late = two.quota(KEY, BOUNDS)
    await refusal(late)
    assert len(await fill(two.quota(OTHER, BOUNDS))) == 5
    leaves[0]()
    await late.enter(at(0.0))
    await refusal(late)


async def test_the_rate_is_one_for_all(tmp_path: Path) -> None:
    bounds = KeyBounds(per_minute=60)
    one = SharedCounts(tmp_path).quota(KEY, bounds)
    two = SharedCounts(tmp_path).quota(KEY, bounds)
    for number in range(60):
        await (one, two)[number % 2].enter(at(100.0))
    assert (await refusal(two, 100.25)).retry_after_ms == 750
    await one.enter(at(101.0))
    await refusal(two, 101.5)
    await two.enter(at(102.0))
    assert one.num_running == 62  # what was refused for its rate took no place


async def test_the_clock_is_read_when_the_wait_for_the_lock_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_quota, "LOCK_TIMEOUT_S", 60.0)
    bounds = KeyBounds(per_minute=60)
    quota = SharedCounts(tmp_path).quota(KEY, bounds)
    for _ in range(60):
        await quota.enter(at(100.0))
    now = 100.0
    with key_file(tmp_path).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = asyncio.create_task(quota.enter(lambda: now))
        await asyncio.sleep(0.01)
        now = 102.0
    await waiting
    await quota.enter(at(102.0))
    assert (await refusal(quota, 102.0)).retry_after_ms == 1000


async def test_a_clock_that_steps_back_refills_nothing_twice(tmp_path: Path) -> None:
    quota = SharedCounts(tmp_path).quota(KEY, KeyBounds(per_minute=60))
    for _ in range(60):
        await quota.enter(at(130.0))
    for now in (100.0, 130.0, 70.5, 129.0, 130.5):
        await refusal(quota, now)
    await quota.enter(at(131.0))


async def test_a_clock_that_began_anew_does_not_lock_a_key_out(tmp_path: Path) -> None:
    quota = SharedCounts(tmp_path).quota(KEY, KeyBounds(per_minute=1))
    await quota.enter(at(1e9))
    await refusal(quota, 5.0)
    await quota.enter(at(65.0))


async def test_who_stands_still_with_a_keys_lock_stops_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = SharedCounts(tmp_path).quota(KEY, BOUNDS)
    with key_file(tmp_path).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ticks = 0
        # A second is ten turns of the loop: who waits without letting it go on waits for ever.
        clock = SimpleNamespace(monotonic=lambda: ticks / 10)
        monkeypatch.setattr(shared_quota, "time", clock)

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        other = asyncio.create_task(tick())
        error = await refusal(quota)
        other.cancel()
        assert ticks > 10 * shared_quota.LOCK_TIMEOUT_S
        assert (error.reason, error.retry_after_ms) == (FailureReason.UPSTREAM_LOST, 1000)
    await quota.enter(at(0.0))


def test_a_folder_that_cannot_be_used_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--key-limits-path .*file"):
        SharedCounts(tmp_path / "file")
    monkeypatch.setattr(shared_quota, "MAX_PROCESSES", 2)
    for _ in range(2):
        SharedCounts(tmp_path / "counts")
    with pytest.raises(ConfigError, match="2 processes count there already"):
        SharedCounts(tmp_path / "counts")
    folder = tmp_path / "odd"
    counts = SharedCounts(folder)
    counts.quota(KEY, BOUNDS)
    path = key_file(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="--key-limits-path"):
        counts.quota(KEY, BOUNDS)


def test_neither_keys_nor_counts_are_for_others(tmp_path: Path) -> None:
    folder = tmp_path / "counts"
    SharedCounts(folder).quota(KEY, BOUNDS)
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert KEY.hex()[:16] not in path.name
