"""The watch of a world, all of whose ranks are in this process."""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from services.worker.parallel import verdict as verdict_module
from services.worker.parallel import watch as watch_module
from services.worker.parallel.progress import Progress
from services.worker.parallel.watch import Hub, Spoke, Watch, make_watch

LIMIT_S = 3.0


class World:
    def __init__(self, size: int) -> None:
        self.store = HashStore()
        self.progress = [Progress() for _ in range(size)]
        self.watches: list[Any] = [self._make(rank, size) for rank in range(size)]
        for watch in self.watches:
            watch.start()
        assert until(lambda: len(self.watches[0]._members) == size - 1)

    def _make(self, rank: int, size: int) -> Watch:
        return make_watch(
            self.store,
            "file:///tmp/x",
            rank=rank,
            size=size,
            progress=self.progress[rank],
            limit_s=LIMIT_S,
        )

    def verdicts(self) -> list[str]:
        return [watch.verdict for watch in self.watches]


def until(is_so: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(3)
    yield made
    for watch in reversed(made.watches):
        watch.close()


def test_a_failure_reaches_every_rank(world: World) -> None:
    assert isinstance(world.watches[0], Hub)
    assert isinstance(world.watches[2], Spoke)
    world.watches[2].fail("failed in step 3: out of ink", is_echo=False)
    assert until(lambda: all(world.verdicts()))
    assert set(world.verdicts()) == {"rank 2 failed in step 3: out of ink"}


def test_the_first_verdict_stands(world: World) -> None:
    world.watches[0].fail("failed first", is_echo=False)
    assert until(lambda: all(world.verdicts()))
    world.watches[1].fail("failed later", is_echo=False)
    time.sleep(0.3)
    assert set(world.verdicts()) == {"rank 0 failed first"}


def test_a_broken_exchange_waits_for_its_cause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cause comes in time even if this process has to wait for its turn.
    monkeypatch.setattr(watch_module, "_GRACE_S", 30.0)
    world.watches[1].fail("failed: connection closed by peer", is_echo=True)
    assert until(lambda: world.watches[0]._echo is not None)
    assert not any(world.verdicts())
    # As a process does that is killed: no word of parting.
    world.watches[2]._line.socket.shutdown(socket.SHUT_RDWR)
    assert until(lambda: bool(world.watches[0].verdict))
    assert world.watches[0].verdict.startswith("rank 2: its process ended; rank 0 is idle")


def test_an_echo_without_a_cause_is_the_verdict_after_a_while(world: World) -> None:
    world.watches[1].fail("failed: timed out", is_echo=True)
    assert until(lambda: all(world.verdicts()))
    assert set(world.verdicts()) == {"rank 1 failed: timed out"}


def test_a_step_that_takes_too_long_is_a_verdict_on_who_does_not_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Should this process get no turn for a while, none of its ranks counts as gone.
    monkeypatch.setattr(verdict_module, "SILENT_S", 60.0)
    for rank, progress in enumerate(world.progress):
        progress.begin(4)
        if rank != 1:
            progress.enter("tp.all_reduce")
    assert until(lambda: all(world.verdicts()), LIMIT_S + 10)
    assert "rank 1 is in step 4" in world.verdicts()[0]
    assert "rank 2" not in world.verdicts()[0]


def test_the_others_notice_that_rank_0_is_gone(world: World) -> None:
    # Members leave while their lines are cut.
    for member in list(world.watches[0]._members.values()):
        member.line.socket.shutdown(socket.SHUT_RDWR)
    assert until(lambda: bool(world.watches[1].verdict and world.watches[2].verdict))
    assert world.watches[1].verdict == "rank 0: its process ended; rank 1 is idle after step 0"


def test_a_silent_rank_0_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Frozen: its sockets stay open and nothing comes.
    monkeypatch.setattr(world.watches[0]._beat, "_turn", lambda: time.sleep(0.05))
    assert until(lambda: bool(world.watches[1].verdict), LIMIT_S + 10)
    said = r"rank 0 has been silent for (\d+\.\d) s; rank 1 is idle after step 0"
    found = re.fullmatch(said, world.watches[1].verdict)
    assert found is not None
    assert float(found[1]) >= LIMIT_S


def test_ranks_that_leave_in_order_are_not_missed(world: World) -> None:
    world.watches[2].close()
    assert until(lambda: len(world.watches[0]._members) == 1)
    assert not any(world.verdicts())
    world.watches[0].close()
    time.sleep(0.3)
    assert not any(world.verdicts())


def test_strangers_at_the_port_count_for_nothing(world: World) -> None:
    host, port, _ = json.loads(world.store.get("watch"))
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b'GET / HTTP/1.1\r\n\r\n{"failed": "x", "is_echo": false}\n[1]\n')
        stranger.sendall(b'{"token": "wrong", "rank": 1}\n{"bye": true}\n')
        time.sleep(0.3)
    time.sleep(0.3)
    assert not any(world.verdicts())
    assert sorted(world.watches[0]._members) == [1, 2]
