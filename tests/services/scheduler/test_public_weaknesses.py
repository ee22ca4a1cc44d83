"""What went wrong in public in other schedulers, each as a promise of this one.

docs/scheduling.md lists the reports. Those whose feature is not built (moving KV blocks between
deployments) have no test here; constraints have theirs in `test_server_constraints.py`.
"""

import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import SequenceEnd
from services.scheduler.outlet import Outlet
from services.scheduler.plan import FinishCode
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason
from tests.services.scheduler.builders import capacity, entry, limits, submission
from tests.services.scheduler.harness import Harness


def end_of(harness: Harness, stream_id: int) -> SequenceEnd:
    end = harness.streams[stream_id].end
    assert end is not None
    return end


# -- head of line --------------------------------------------------------------------------------


def test_a_sequence_that_gives_way_itself_does_not_end_the_step_for_the_others() -> None:
    """Blocks run out while three grow; whoever yields, every other one gets its token."""
    harness = Harness(capacity(num_blocks=11, max_model_len=28, max_num_seqs=3))
    harness.submit(Outlet(), [7, 7, 7], max_tokens=20)
    while not harness.core.load().num_preemptions_total:
        before = [len(s.tokens) for s in harness.streams.values()]
        harness.step()
    after = [len(s.tokens) for s in harness.streams.values()]
    assert sum(new > old for old, new in zip(before, after, strict=True)) == 2
    harness.run_to_end()


def test_no_step_goes_out_empty_while_the_least_urgent_gives_way() -> None:
    """The least urgent is the first of those that run, and nothing is free."""
    harness = Harness(capacity(num_blocks=11, max_model_len=28, max_num_seqs=3), policy="priority")
    outlet = Outlet()
    harness.submit(outlet, [7], max_tokens=20, priority=5)
    harness.submit(outlet, [7, 7], max_tokens=20)
    while not harness.core.load().num_preemptions_total:
        assert harness.plan() is not None
        harness.take_result()
    assert len(harness.plans[-1].rows) >= 2
    late = harness.streams[0]
    harness.run_to_end()
    assert end_of(harness, 0).stats.num_preemptions >= 1
    assert len(late.tokens) == 20


# -- what can never fit --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_can_never_fit_is_refused_at_the_door_with_the_number(policy: str) -> None:
    harness = Harness(capacity(num_blocks=9), policy=policy)
    (verdict,) = harness.submit(Outlet(), [40])
    assert verdict.refusal is not None
    assert verdict.refusal.reason is FailureReason.KV_CAPACITY_EXCEEDED
    assert "41 tokens need 11 KV blocks, the worker has 8" in verdict.refusal.message
    harness.submit(Outlet(), [5])
    harness.run_to_end()


def test_a_watermark_does_not_keep_the_largest_request_out() -> None:
    harness = Harness(capacity(num_blocks=17), watermark=0.9)
    harness.submit(Outlet(), [60], max_tokens=3)
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 3


# -- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_a_sequence_loses_its_place_a_few_times_and_not_at_every_block(window: int) -> None:
    """Eight sequences of ten blocks each share sixteen; each return waits for twice the room."""
    harness = Harness(
        capacity(num_blocks=17, max_num_seqs=8, num_rows=16), max_plans_in_flight=window
    )
    harness.submit(Outlet(), [4] * 8, max_tokens=36)
    harness.run_to_end()
    assert max(end_of(harness, n).stats.num_preemptions for n in range(8)) <= 3
    load = harness.core.load()
    assert load.num_recomputed_tokens_total < 8 * 36


def test_a_watermark_leaves_blocks_free_when_it_admits() -> None:
    harness = Harness(capacity(num_blocks=21), watermark=0.2)
    harness.submit(Outlet(), [36], max_tokens=4)
    harness.step()
    harness.submit(Outlet(), [30], max_tokens=2)
    harness.step()
    assert not harness.streams[1].tokens, "10 of 20 are taken, 8 needed, 4 stay free"
    harness.submit(Outlet(), [20], max_tokens=2)
    harness.step()
    assert harness.streams[2].tokens
    harness.run_to_end()


def test_the_cheapest_gives_way_and_not_the_one_with_the_long_prompt() -> None:
    harness = Harness(capacity(num_blocks=17, max_num_seqs=3))
    outlet = Outlet()
    harness.submit(outlet, [9], max_tokens=24)
    harness.submit(outlet, [3], max_tokens=24)
    harness.submit(outlet, [33], max_tokens=24)
    while not harness.core.load().num_preemptions_total:
        harness.step()
    assert [outlet.sequences[n].num_preemptions for n in range(3)] == [0, 1, 0]
    harness.run_to_end()


# -- priorities ----------------------------------------------------------------------------------


def priorities(**config: object) -> tuple[Harness, Outlet]:
    harness = Harness(capacity(max_num_seqs=2, num_blocks=64), policy="priority", **config)
    return harness, Outlet()


@pytest.mark.parametrize("window", [1, 2])
def test_an_urgent_request_takes_the_seat_of_a_less_urgent_one(window: int) -> None:
    harness, outlet = priorities(max_plans_in_flight=window)
    harness.submit(outlet, [5, 5], max_tokens=30, priority=1)
    for _ in range(3):
        harness.step()
    harness.submit(outlet, [5], max_tokens=3)
    for _ in range(6):
        harness.step()
    assert harness.streams[2].end is not None
    assert harness.core.load().num_preemptions_total == 1
    harness.run_to_end()
    assert [len(harness.streams[n].tokens) for n in range(3)] == [30, 30, 3]


def test_equals_never_take_each_others_seats() -> None:
    harness, outlet = priorities(priority_ageing_s=0.001)
    harness.submit(outlet, [5] * 6, max_tokens=20, priority=1)
    harness.run_to_end()
    assert harness.core.load().num_preemptions_total == 0


def test_one_that_was_pushed_out_does_not_push_back() -> None:
    """However long it waits: ageing decides who is next, and never who must go."""
    harness, outlet = priorities(priority_ageing_s=0.001)
    harness.submit(outlet, [5, 5], max_tokens=40, priority=1)
    harness.step()
    harness.submit(outlet, [5, 5], max_tokens=40)
    for _ in range(30):
        harness.step()
    assert harness.core.load().num_preemptions_total == 2
    harness.run_to_end()
    assert harness.core.load().num_preemptions_total == 2


def test_an_urgent_request_gets_the_blocks_of_less_urgent_ones() -> None:
    harness = Harness(capacity(num_blocks=17), policy="priority")
    outlet = Outlet()
    harness.submit(outlet, [20, 20], max_tokens=20, priority=1)
    harness.step()
    harness.submit(outlet, [40], max_tokens=2)
    for _ in range(5):
        harness.step()
    assert harness.streams[2].end is not None
    harness.run_to_end()


def test_a_preempted_sequence_is_back_before_newcomers_of_its_priority() -> None:
    harness, outlet = priorities()
    harness.submit(outlet, [5, 5], max_tokens=20, priority=1)
    harness.step()
    harness.submit(outlet, [5], max_tokens=4)
    harness.step()
    harness.submit(outlet, [5], max_tokens=4, priority=1)
    starts: list[int] = []
    while not harness.streams[3].tokens:
        harness.step()
        starts = [new.sampling.seed for plan in harness.plans for new in plan.new_sequences]
    assert starts[:3] == [0, 1, 2]
    assert starts.index(3) > max(place for place, seed in enumerate(starts) if seed < 2)
    harness.run_to_end()


# -- waiting without end -------------------------------------------------------------------------


def test_waiting_ends_at_the_latest_with_its_deadline_and_the_others_go_on() -> None:
    harness = Harness(capacity(max_num_seqs=1))
    harness.submit(Outlet(), [5], max_tokens=50)
    harness.step()
    harness.submit(Outlet(), [5], timeout_ms=20)
    harness.submit(Outlet(), [5], first_token_timeout_ms=10)
    for _ in range(25):
        harness.step()
        harness.core.tick(harness.now)
        harness.check()
    for stream_id in (1, 2):
        failure = end_of(harness, stream_id).failure
        assert failure is not None
        assert failure.reason is FailureReason.DEADLINE_EXCEEDED
    assert harness.streams[0].end is None
    harness.run_to_end()


def test_a_first_token_that_came_in_time_ends_its_limit() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], max_tokens=30, first_token_timeout_ms=5)
    for _ in range(20):
        harness.step()
        harness.core.tick(harness.now)
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 30


def test_a_sequence_that_goes_on_had_its_first_token_elsewhere() -> None:
    """Lost by one scheduler and submitted to another: its next token is not its first."""
    core, outlet = SchedulerCore(CoreConfig()), Outlet()
    core.worker_opened(capacity(), 0.0)
    entries = entry(stream_id=0, output=(9,)), entry(stream_id=1)
    core.submit(submission(*entries, first_token_timeout_ms=5), outlet, 0.0)
    core.tick(0.01)
    assert list(outlet.sequences) == [0]


def test_a_full_queue_takes_what_had_its_place_elsewhere() -> None:
    core, outlet = SchedulerCore(CoreConfig(max_queued_requests=1)), Outlet()
    core.worker_opened(capacity(), 0.0)
    core.submit(submission(entry(stream_id=0), request_id="first"), outlet, 0.0)
    (verdict,) = core.submit(submission(entry(stream_id=1), request_id="new"), outlet, 0.0)
    assert verdict.refusal is not None
    resumed = submission(entry(stream_id=1, output=(9,)), request_id="resumed")
    (verdict,) = core.submit(resumed, outlet, 0.0)
    assert verdict.refusal is None


def test_a_budget_that_measured_speed_cannot_meet_is_refused_at_once() -> None:
    """32 tokens a millisecond were measured, so 60 tokens take two."""
    harness = Harness(capacity())
    harness.submit(Outlet(), [32], max_tokens=1)
    harness.run_to_end()
    (verdict,) = harness.submit(Outlet(), [60], first_token_timeout_ms=1)
    assert verdict.refusal is not None
    assert verdict.refusal.field == "first_token_timeout_ms"
    (verdict,) = harness.submit(Outlet(), [60], first_token_timeout_ms=3)
    assert verdict.refusal is None


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_with_nobody_running_whoever_waits_starts(policy: str) -> None:
    """Blocks held by plans in flight, a watermark, passed heads: nothing is left to wait for."""
    harness = Harness(
        capacity(num_blocks=9, max_model_len=32),
        policy=policy,
        watermark=0.5,
        max_plans_in_flight=2,
    )
    outlet = Outlet()
    harness.submit(outlet, [20, 4, 20], max_tokens=6)
    for stream_id in range(3):
        harness.step()
        harness.abort(stream_id)
        harness.submit(outlet, [24], max_tokens=2)
    harness.run_to_end()


# -- ends and plans in flight --------------------------------------------------------------------


def test_an_abort_during_the_last_step_is_an_abort() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], max_tokens=1)
    harness.plan()
    harness.abort(0, AbortReason.CANCELLED)
    harness.take_result()
    assert end_of(harness, 0).finish_reason is FinishReason.ABORT
    assert harness.core.load().num_aborts_total == 1


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_preemption_in_the_midst_of_chunks_with_two_plans_in_flight_loses_no_token(
    num_drafts: int,
) -> None:
    harness = Harness(
        capacity(
            num_blocks=12,
            max_num_batched_tokens=8 * (1 + num_drafts),
            max_model_len=44,
            num_speculative_tokens=num_drafts,
        ),
        max_plans_in_flight=2,
    )
    harness.submit(Outlet(), [9, 17, 13], max_tokens=20)
    harness.run_to_end()
    assert harness.core.load().num_preemptions_total > 0
    assert [len(harness.streams[n].tokens) for n in range(3)] == [20, 20, 20]


def test_one_that_surely_ends_gives_its_seat_to_the_next_before_its_result_is_read() -> None:
    """Requests for a single token keep two plans in flight as full as one."""
    harness = Harness(capacity(max_num_seqs=2, num_blocks=64), max_plans_in_flight=2)
    harness.submit(Outlet(), [5] * 8, max_tokens=1)
    first, second = harness.plan(), harness.plan()
    assert first is not None
    assert second is not None
    assert (len(first.rows), len(second.rows)) == (2, 2)
    assert not set(first.rows) & set(second.rows)
    harness.run_to_end()


def test_a_sequence_that_ends_early_gives_its_seat_with_its_result() -> None:
    harness = Harness(capacity(max_num_seqs=1, num_blocks=64), max_plans_in_flight=2)
    harness.ends_at[0] = (7, FinishCode.EOS)
    harness.submit(Outlet(), [5, 5], max_tokens=20)
    while harness.streams[0].end is None:
        harness.step()
    plan = harness.plan()
    assert plan is not None
    assert [new.sampling.seed for new in plan.new_sequences] == [1]
    harness.run_to_end()


# -- drafts and the prefix cache -----------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
def test_drafts_cost_no_hits(num_drafts: int) -> None:
    """Whole blocks but for the last token, whatever is drafted behind them."""
    harness = Harness(capacity(num_blocks=64, num_speculative_tokens=num_drafts))
    for _ in range(2):
        harness.submit(Outlet(), [25], max_tokens=9, fork=99)
        harness.run_to_end()
    assert end_of(harness, 1).stats.num_cached_tokens == 24


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_drafts_stay_inside_a_context_of_whole_blocks(block_size: int) -> None:
    """The worker of the harness refuses a position without a block."""
    num_blocks = 64 // block_size
    harness = Harness(
        capacity(
            num_blocks=num_blocks + 1,
            block_size_tokens=block_size,
            max_model_len=64,
            num_speculative_tokens=5,
        ),
        max_plans_in_flight=2,
    )
    harness.submit(Outlet(), [50], max_tokens=100)
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 14
    blocks = sum(sum(plan.num_new_blocks) for plan in harness.plans)
    assert blocks <= num_blocks


def test_blocks_that_are_not_full_are_never_found_and_the_first_to_be_used_again() -> None:
    harness = Harness(capacity(num_blocks=64))
    harness.submit(Outlet(), [11], max_tokens=2)
    harness.run_to_end()
    assert harness.core.load().num_cached_blocks == 3, "twelve tokens are computed"
    harness.submit(Outlet(), [3], max_tokens=1)
    plan = harness.plan()
    assert plan is not None
    assert harness.core.load().num_cached_blocks == 3, "no full block had to go"
    harness.run_to_end()


# -- balance -------------------------------------------------------------------------------------


def test_replicas_are_kept_equally_busy() -> None:
    harness = Harness(capacity(num_blocks=64, max_num_seqs=8, num_rows=16), num_replicas=4)
    harness.submit(Outlet(), [9] * 24, max_tokens=30)
    for _ in range(3):
        harness.step()
    loads = [replica.num_running for replica in harness.core.load().replicas]
    assert loads == [6, 6, 6, 6]


def test_limits_say_what_a_long_prompt_is() -> None:
    assert limits(CoreConfig(long_prefill_token_threshold=7)).num_long_tokens == 7
