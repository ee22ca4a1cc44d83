"""Collections happen between steps, and their pauses are known."""

import gc
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from services.scheduler import collector
from services.scheduler.collector import Collector


@pytest.fixture
def running() -> Iterator[Collector]:
    found = Collector()
    found.start()
    yield found
    found.stop()
    gc.unfreeze()


class Knot:
    """Refers to itself: only a collection can take it."""

    num_alive = 0

    def __init__(self) -> None:
        self.itself = self
        Knot.num_alive += 1

    def __del__(self) -> None:
        Knot.num_alive -= 1


def test_steps_are_not_interrupted_by_old_objects(running: Collector) -> None:
    before = [generation["collections"] for generation in gc.get_stats()]
    kept = [[n] for n in range(200_000)]
    after = [generation["collections"] for generation in gc.get_stats()]
    assert len(kept) == 200_000
    assert after[0] - before[0] <= 5, "the young ones only, and rarely"
    assert after[1:] == before[1:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The collector's alone: others wait by the real one while they are collected."""
    found = SimpleNamespace(now=1000.0, perf_counter=time.perf_counter)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(collector, "time", found)
    return found


def test_what_is_due_is_collected_between_steps(clock: SimpleNamespace, running: Collector) -> None:
    Knot()
    running.rest()
    assert Knot.num_alive == 1, "nothing is due yet"
    clock.now += 31.0
    running.rest()
    assert Knot.num_alive == 0


def test_the_time_it_takes_to_start_makes_nothing_due(clock: SimpleNamespace) -> None:
    found = Collector()
    clock.now += 31.0  # a large heap: freezing it takes this long
    found.start()
    try:
        Knot()
        found.rest()
        assert Knot.num_alive == 1
    finally:
        found.stop()
        gc.unfreeze()
        gc.collect()


def test_pauses_are_measured(running: Collector) -> None:
    gc.collect()
    gc.collect()
    assert 0 < running.longest_s <= running.pause_s


def test_the_process_gets_its_collector_back() -> None:
    before = gc.get_threshold(), len(gc.callbacks)
    found = Collector()
    found.start()
    assert gc.get_threshold() != before[0]
    found.stop()
    gc.unfreeze()
    assert (gc.get_threshold(), len(gc.callbacks)) == before
