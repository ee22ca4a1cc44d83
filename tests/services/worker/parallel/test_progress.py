import pytest

from services.worker.parallel import progress as module
from services.worker.parallel.progress import Position, Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_position_tells_step_time_and_exchange(clock: list[float]) -> None:
    progress = Progress()
    assert progress.position() == Position()
    progress.begin(7)
    progress.enter("tp.all_reduce")
    progress.leave()
    progress.enter("ep.all_to_all")
    clock[0] += 2.5
    expected = Position(step=7, seconds=2.5, num_meetings=2, meeting="ep.all_to_all")
    assert progress.position() == expected
    assert str(expected) == (
        "in step 7 for 2.5 s, waiting in ep.all_to_all (exchange 2 of the step)"
    )
    progress.leave()
    assert "computing" in str(progress.position())


def test_between_steps_a_rank_is_idle_and_the_next_step_counts_anew(clock: list[float]) -> None:
    progress = Progress()
    progress.begin(7)
    progress.enter("tp.all_reduce")
    progress.leave()
    progress.end()
    clock[0] += 60
    assert progress.position().seconds == 0
    assert str(progress.position()) == "idle after step 7"
    progress.begin(8)
    assert progress.position().num_meetings == 0
    assert progress.position().seconds > 0
