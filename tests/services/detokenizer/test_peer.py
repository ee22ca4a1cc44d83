from typing import Any

import pytest

from services.detokenizer.peer import SchedulerPeer
from services.detokenizer.placement import Newcomer, SchedulerWork
from shared.sampling import LoadSnapshot
from tests.services.detokenizer.fake_client import FakeClient


def peer(**load: Any) -> tuple[SchedulerPeer, FakeClient]:
    """One that is reached and has told a snapshot."""
    states: list[bool] = []
    made = SchedulerPeer("unix:/s", on_state=states.append, on_load=lambda _: None)
    client = FakeClient()
    made.client = client  # type: ignore[assignment]  # the part of it that is used
    made._take_state(True)
    made._take_load(LoadSnapshot(**{"instance_id": "i", "is_worker_ready": True, **load}))
    assert states == [True]
    return made, client


@pytest.mark.parametrize(
    ("load", "is_open", "is_ready"),
    [
        ({}, True, True),
        ({"is_worker_ready": False}, True, False),
        ({"is_draining": True}, False, False),
    ],
)
def test_whether_it_takes_requests(load: dict[str, bool], is_open: bool, is_ready: bool) -> None:
    made, client = peer(**load)
    assert (made.is_open, made.is_ready) == (is_open, is_ready)
    client.is_connected = False
    assert (made.is_reached, made.is_open, made.is_ready) == (False, False, False)


def test_before_its_first_snapshot_it_may_be_asked_but_is_not_ready() -> None:
    made, _ = peer()
    made._take_state(True)
    assert made.is_open
    assert not made.is_ready
    assert made.serves("any model")


def test_its_work_is_its_snapshot_and_what_was_sent_since() -> None:
    made, _ = peer(
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=100,
        num_catch_up_tokens=10,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    leg = object()
    made.credit.add(leg, Newcomer(num_sequences=2, num_tokens=7))
    expected = SchedulerWork(
        name="unix:/s", num_sequences=7, num_tokens=117, num_seats=64, num_step_tokens=512
    )
    assert made.work() == expected
    made.credit.answer(leg)
    made._take_load(LoadSnapshot(num_running=7))
    assert made.work().num_sequences == 7


def test_it_serves_one_model() -> None:
    made, _ = peer(model_digest="m")
    assert made.serves("m")
    assert made.serves("")
    assert not made.serves("other")


def test_silence_is_counted_in_looks_and_ends_with_any_message() -> None:
    made, client = peer()
    assert [made.look() for _ in range(3)] == [1, 2, 3]
    client.silence.hear()
    assert [made.look() for _ in range(2)] == [0, 1]
    client.is_connected = False
    assert made.look() == 0, "it is known to be lost"


def test_one_that_gives_no_signs_of_life_is_never_silent() -> None:
    made, _ = peer(instance_id="")
    assert [made.look() for _ in range(3)] == [0, 0, 0]
