"""Steps, bubbles and the queue's pace, measured."""

import pytest

from services.scheduler.pace import QueuePace, StepClock


def test_steps_and_the_gaps_between_them_are_added_up() -> None:
    clock = StepClock()
    clock.finished(1.0, 1.5, 0, 0.0)
    clock.left(has_work=True)
    clock.finished(1.6, 2.0, 0, 0.0)
    assert (clock.busy_s, clock.idle_s) == pytest.approx((0.9, 0.1))


def test_a_gap_without_work_is_no_bubble() -> None:
    clock = StepClock()
    clock.finished(1.0, 1.5, 0, 0.4)
    clock.left(has_work=False)
    clock.finished(9.0, 9.5, 0, 7.5)
    assert clock.idle_s == 0


def test_a_plan_sent_ahead_leaves_no_gap() -> None:
    """The second plan was made while the first was run: the device went on at once."""
    clock = StepClock()
    clock.finished(1.0, 1.5, 0, 0.0)
    clock.left(has_work=True)
    clock.finished(1.1, 2.0, 0, 0.0)
    assert (clock.busy_s, clock.idle_s) == pytest.approx((1.0, 0.0))


def test_what_the_worker_waited_counts_where_it_is_more() -> None:
    clock = StepClock()
    clock.finished(1.0, 1.5, 0, 0.0)
    clock.left(has_work=True)
    clock.finished(1.6, 2.0, 0, 0.25)
    assert clock.idle_s == pytest.approx(0.25)


def test_the_rate_of_prompts_follows_the_latest_steps() -> None:
    clock = StepClock()
    assert clock.prompt_tokens_per_s == 0
    clock.finished(0.0, 1.0, 1000, 0.0)
    clock.finished(1.0, 2.0, 0, 0.0)
    assert clock.prompt_tokens_per_s == pytest.approx(1000)
    for second in range(2, 300):
        clock.finished(float(second), second + 1.0, 4000, 0.0)
    assert clock.prompt_tokens_per_s == pytest.approx(4000, rel=0.01)


def test_the_pace_of_the_queue_counts_only_while_some_wait() -> None:
    pace = QueuePace()
    for tick in range(31):
        pace.look(tick / 10, 2 * tick, is_waiting=True)
    assert pace.per_s == pytest.approx(20.0)
    pace.look(4.0, 60, is_waiting=False)
    pace.look(100.0, 60, is_waiting=True)
    pace.look(100.5, 60, is_waiting=True)
    assert pace.per_s == pytest.approx(20.0), "idle time is no slow time"
    pace.look(101.1, 60, is_waiting=True)
    assert pace.per_s is not None
    assert pace.per_s < 20.0


def test_before_anything_waited_there_is_no_pace() -> None:
    assert QueuePace().per_s is None
