"""Counts, stations and times of one sequence."""

from services.scheduler.sequence import SequenceState
from tests.services.scheduler.builders import sequence


def test_confirmed_tokens_are_prompt_and_output() -> None:
    one = sequence(5)
    one.output_token_ids.extend([1, 2])
    assert one.num_tokens == 7
    assert one.total_limit == 13


def test_leaving_forgets_what_running_needs() -> None:
    one = sequence()
    one.state, one.row, one.plan_limit = SequenceState.RUNNING, 3, 8
    one.is_plain = one.is_growable = True
    one.leave(SequenceState.WAITING)
    assert (one.state, one.row, one.plan_limit) == (SequenceState.WAITING, -1, 0)
    assert not one.is_plain
    assert not one.is_growable


def test_times_are_cut_at_the_stations_that_were_reached() -> None:
    one = sequence(arrived_at=1.0)
    never_planned = one.stats(1.5, 0)
    assert (never_planned.queue_us, never_planned.prefill_us) == (500_000, 0)
    one.planned_at, one.first_token_at = 1.25, 2.0
    stats = one.stats(4.0, 3)
    assert (stats.queue_us, stats.prefill_us, stats.decode_us) == (250_000, 750_000, 2_000_000)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (5, 3)


def test_the_timeline_carries_request_and_trace() -> None:
    line = sequence(arrived_at=1.0).timeline(3.0)
    assert (line.request_id, line.traceparent) == ("r", "00-a-b-01")
    assert (line.arrived_at, line.planned_at, line.ended_at) == (1.0, None, 3.0)
