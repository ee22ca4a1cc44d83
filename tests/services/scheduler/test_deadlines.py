"""Deadlines are told once and do not keep the dead in memory."""

from services.scheduler.deadlines import SMALL_HEAP, Deadlines
from services.scheduler.sequence import SequenceState
from tests.services.scheduler.builders import sequence


def test_only_the_live_whose_time_is_over_are_told_and_once() -> None:
    deadlines = Deadlines()
    early, late, ended = sequence(), sequence(), sequence()
    deadlines.add(late, 2.0)
    deadlines.add(early, 1.0)
    deadlines.add(ended, 0.5)
    ended.state = SequenceState.ENDED
    assert deadlines.expired(0.9) == []
    assert deadlines.expired(1.0) == [(early, False)]
    assert deadlines.expired(1.5) == []
    assert deadlines.expired(3.0) == [(late, False)]


def test_ended_sequences_are_forgotten_long_before_their_deadline() -> None:
    deadlines = Deadlines()
    for _ in range(10_000):
        short_lived = sequence()
        deadlines.add(short_lived, 3600.0)
        short_lived.state = SequenceState.ENDED
        deadlines.ended()
    assert len(deadlines) <= SMALL_HEAP + 1
