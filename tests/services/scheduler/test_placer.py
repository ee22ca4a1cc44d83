"""A replica asks before each plan; a queue that has to wait is not looked through each time."""

import pytest

from services.scheduler.outlet import Outlet
from services.scheduler.replica import Replica
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.harness import Harness


def full() -> tuple[Harness, Outlet]:
    """Two replicas whose rows are all taken, and one sequence that waits."""
    harness, outlet = Harness(capacity(max_num_seqs=1), num_replicas=2), Outlet()
    harness.submit(outlet, [5, 5], max_tokens=20)
    harness.step()
    harness.submit(outlet, [5], max_tokens=1)
    harness.step()
    return harness, outlet


def test_a_queue_that_has_to_wait_costs_no_look_at_the_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, _ = full()

    def looked(_self: Replica) -> None:
        pytest.fail("all replicas were looked at though nothing had changed")

    monkeypatch.setattr(Replica, "work", looked)
    for _ in range(2):
        harness.step()


@pytest.mark.parametrize("which", [0, 1])
def test_whoever_gets_room_gets_the_next_one(which: int) -> None:
    harness, _ = full()
    harness.abort(which)
    for _ in range(3):
        harness.step()
    assert harness.streams[2].end is not None
    assert harness.streams[1 - which].end is None


def test_a_newcomer_is_looked_at_though_no_replica_changed() -> None:
    harness, outlet = Harness(capacity(), num_replicas=2), Outlet()
    harness.submit(outlet, [40, 40], max_tokens=20)
    harness.step()
    harness.submit(outlet, [40])
    harness.step()
    assert harness.core.load().num_waiting == 1
    harness.submit(outlet, [4], max_tokens=1)
    harness.step()
    assert harness.streams[3].end is not None


def test_a_seat_that_was_taken_for_one_short_step_is_free_again() -> None:
    harness, outlet = Harness(capacity(max_num_seqs=1), num_replicas=2), Outlet()
    for _ in range(5):
        harness.submit(outlet, [5], max_tokens=1)
    # Replicas are as idle as when nobody further had room: those that took it had not begun.
    harness.run_to_end()
