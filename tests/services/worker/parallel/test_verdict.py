import pytest

from services.worker.parallel.progress import Position
from services.worker.parallel.verdict import Heard, find_stall

LIMIT_S = 10.0


def heard(
    step: int, seconds: float = 0.0, meeting: str = "", num_meetings: int = 0, age_s: float = 0.1
) -> Heard:
    position = Position(step=step, seconds=seconds, meeting=meeting, num_meetings=num_meetings)
    return Heard(position=position, age_s=age_s)


WAITING = heard(5, 11, "tp.all_reduce", 4)


def test_a_world_that_moves_or_idles_is_left_alone() -> None:
    assert find_stall({0: heard(5, 3), 1: heard(5, 3, "tp.all_reduce", 1)}, LIMIT_S) == ""
    # Idle for hours, and heard of all the while.
    assert find_stall({0: heard(5), 1: heard(5)}, LIMIT_S) == ""


@pytest.mark.parametrize(
    ("other", "said"),
    [
        # Not heard of: frozen, or its machine is gone.
        (heard(5, 1, "tp.all_reduce", 4, age_s=10), "rank 1 has been silent for 10.0 s, last in"),
        # It has not begun what the others are in.
        (heard(4), "rank 1 is idle after step 4"),
        (heard(4, 20, "tp.all_reduce", 9), "rank 1 is in step 4 for 20.0 s"),
        # All others wait; it does not.
        (heard(5, 11, "", 3), "rank 1 is in step 5 for 11.0 s, computing (exchange 3 of the step)"),
        # It waits too, but in an earlier exchange.
        (heard(5, 11, "dp.all_gather", 2), "rank 1 is in step 5 for 11.0 s, waiting in dp.all_g"),
    ],
)
def test_the_rank_that_others_wait_for_is_named(other: Heard, said: str) -> None:
    found = find_stall({0: WAITING, 1: other, 2: WAITING}, LIMIT_S)
    assert found.startswith(f"no progress for over 10 s: {said}")
    assert "rank 0" not in found
    assert "rank 2" not in found


def test_where_all_wait_in_one_exchange_all_are_named() -> None:
    found = find_stall({0: WAITING, 1: WAITING}, LIMIT_S)
    assert "rank 0 is" in found
    assert "rank 1 is" in found


def test_silence_alone_is_a_stall() -> None:
    found = find_stall({0: heard(5), 1: heard(5, age_s=11)}, LIMIT_S)
    assert found == (
        "no progress for over 10 s: rank 1 has been silent for 11.0 s, last idle after step 5"
    )


def test_time_goes_on_since_a_rank_was_heard() -> None:
    assert find_stall({0: heard(5, 9, age_s=0.5)}, LIMIT_S) == ""
    assert find_stall({0: heard(5, 9, age_s=1.5)}, LIMIT_S) != ""
