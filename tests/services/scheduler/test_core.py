"""What clients can rely on: verdicts, ends, limits, losses."""

import pytest

from services.scheduler.backlog import MAX_RETRY_MS, MIN_RETRY_MS
from services.scheduler.core import SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import SequenceEnd
from services.scheduler.outlet import Outlet
from services.scheduler.plan import FinishCode
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec
from tests.services.scheduler.builders import capacity, entry, submission
from tests.services.scheduler.harness import LOST, Harness


def end_of(harness: Harness, stream_id: int) -> SequenceEnd:
    end = harness.streams[stream_id].end
    assert end is not None
    return end


def refusal_of(harness: Harness, num_prompt: int, **options: object) -> RequestError:
    (verdict,) = harness.submit(Outlet(), [num_prompt], **options)
    assert verdict.refusal is not None
    return verdict.refusal


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "token", "reason", "stop_token_id"),
    [
        (FinishCode.EOS, 7, FinishReason.STOP, None),
        (FinishCode.EOS, 8, FinishReason.STOP, 8),
        (FinishCode.STOP_TOKEN, 9, FinishReason.STOP, 9),
        (FinishCode.MAX_TOKENS, 7, FinishReason.LENGTH, None),
        (FinishCode.MAX_MODEL_LEN, 9, FinishReason.LENGTH, None),
    ],
)
def test_finish_codes_become_reasons(
    code: FinishCode, token: int, reason: FinishReason, stop_token_id: int | None
) -> None:
    core, outlet = SchedulerCore(CoreConfig()), Outlet()
    core.worker_opened(capacity(), 0.0)
    core.submit(submission(), outlet, 0.0)
    sequence = outlet.sequences[0]
    core.plan(0.0)
    sequence.output_token_ids.append(token)
    core.sequence_finished(sequence, code, 1.0)
    ((_, delivery),) = core.take_deliveries()
    (end,) = delivery.ends
    assert (end.finish_reason, end.stop_token_id) == (reason, stop_token_id)


def test_max_tokens_is_cut_to_the_context() -> None:
    harness = Harness(capacity(max_model_len=12))
    harness.submit(Outlet(), [5], max_tokens=1000)
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 7
    assert end_of(harness, 0).finish_reason is FinishReason.LENGTH


def test_a_context_of_exactly_one_more_token_yields_one_token() -> None:
    harness = Harness(capacity(max_model_len=12))
    harness.submit(Outlet(), [11], max_tokens=5)
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 1
    assert refusal_of(harness, 12).reason is FailureReason.CONTEXT_LENGTH_EXCEEDED


def test_a_sequence_alone_may_fill_the_whole_pool() -> None:
    harness = Harness(capacity(num_blocks=5))
    harness.submit(Outlet(), [15], max_tokens=50)
    harness.run_to_end()
    assert harness.streams[0].num_prompt + len(harness.streams[0].tokens) == 16
    assert refusal_of(harness, 16).reason is FailureReason.KV_CAPACITY_EXCEEDED


def test_a_stop_string_counts_as_a_stop_with_the_tokens_that_were_kept() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], max_tokens=20)
    for _ in range(5):
        harness.step()
    harness.abort(0, AbortReason.STOP_STRING, kept=3)
    end = end_of(harness, 0)
    assert end.finish_reason is FinishReason.STOP
    assert end.stats.num_output_tokens == 3
    assert harness.core.load().num_aborts_total == 0


def test_kept_tokens_cannot_exceed_the_output() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5])
    harness.step()
    harness.abort(0, AbortReason.STOP_STRING, kept=99)
    assert end_of(harness, 0).stats.num_output_tokens == 1


def test_a_slow_reader_is_a_failure_and_a_cancel_an_abort() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5, 5])
    harness.abort(0, AbortReason.SLOW_READER)
    harness.abort(1, AbortReason.CANCELLED)
    failure = end_of(harness, 0).failure
    assert failure is not None
    assert failure.reason is FailureReason.SLOW_READER
    assert end_of(harness, 1).finish_reason is FinishReason.ABORT
    assert harness.core.load().num_aborts_total == 2


def test_an_abort_is_idempotent() -> None:
    harness, outlet = Harness(capacity()), Outlet()
    harness.submit(outlet, [5])
    harness.abort(0)
    harness.abort(0)
    harness.core.abort(outlet, 99, AbortReason.CANCELLED, 0, 0.0)
    assert harness.core.load().num_aborts_total == 1


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("is_in_flight", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_an_abort_in_any_state_gives_every_block_back(
    num_steps: int, is_in_flight: bool, window: int
) -> None:
    """Waiting, in a chunk, at the first token, decoding; between plans and with plans in flight."""
    harness = Harness(capacity(max_num_batched_tokens=4), max_plans_in_flight=window)
    harness.submit(Outlet(), [10, 9])
    for _ in range(num_steps):
        harness.step()
    if is_in_flight:
        while harness.plan():
            pass
    harness.abort(0)
    harness.abort(1)
    while harness.results:
        harness.take_result()
    load = harness.core.load()
    assert load.num_free_blocks == load.num_total_blocks
    assert harness.core.num_live == 0


def test_a_closed_outlet_ends_its_sequences_and_hears_nothing() -> None:
    harness = Harness(capacity())
    gone, staying = Outlet(), Outlet()
    harness.submit(gone, [5, 5])
    harness.submit(staying, [5])
    harness.step()
    harness.plan()
    harness.close(gone)
    harness.run_to_end()
    assert gone.take() is None
    assert len(harness.streams[2].tokens) == 8
    assert harness.core.load().num_aborts_total == 2


def test_abort_by_request_id_ends_all_its_sequences_and_no_other() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5, 5], request_id="a")
    harness.submit(Outlet(), [5], request_id="b")
    harness.step()
    assert harness.core.abort_request("a", 0.0) == 2
    assert harness.core.abort_request("a", 0.0) == 0
    assert harness.core.abort_request("nobody", 0.0) == 0
    harness.run_to_end()
    assert len(harness.streams[2].tokens) == 8


def test_a_deadline_ends_a_sequence_in_any_state() -> None:
    harness = Harness(capacity(max_num_seqs=1))
    harness.submit(Outlet(), [5, 5], timeout_ms=100)
    harness.submit(Outlet(), [5])
    harness.step()
    harness.plan()
    harness.core.tick(0.09)
    assert len(harness.live()) == 3
    harness.now = 0.1
    harness.core.tick(0.1)
    harness.check()
    for stream_id in (0, 1):
        failure = end_of(harness, stream_id).failure
        assert failure is not None
        assert failure.reason is FailureReason.DEADLINE_EXCEEDED
    harness.run_to_end()
    assert len(harness.streams[2].tokens) == 8


@pytest.mark.parametrize("timeout_ms", [0, 3_600_000])
def test_no_request_outlives_the_configured_maximum(timeout_ms: int) -> None:
    core, outlet = SchedulerCore(CoreConfig(max_timeout_s=10.0)), Outlet()
    core.worker_opened(capacity(), 0.0)
    core.submit(submission(timeout_ms=timeout_ms), outlet, 0.0)
    core.tick(9.9)
    assert core.num_live == 1
    core.tick(10.0)
    assert core.num_live == 0


# -- verdicts ------------------------------------------------------------------------------------


def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    harness = Harness(capacity(max_num_seqs=1), max_queued_requests=2)
    harness.submit(Outlet(), [5])
    harness.step()
    harness.submit(Outlet(), [5])
    harness.submit(Outlet(), [5])
    error = refusal_of(harness, 5)
    assert error.reason is FailureReason.QUEUE_FULL
    assert error.retry_after_ms is not None
    assert error.retry_after_ms == MIN_RETRY_MS, "nothing was measured yet"


def test_the_time_to_come_back_is_that_in_which_the_queue_drains() -> None:
    """One sequence leaves it every two seconds, so six take twelve."""
    harness = Harness(capacity(max_num_seqs=1), max_queued_requests=6)
    for _ in range(30):
        while harness.core.load().num_waiting < 6:
            harness.submit(Outlet(), [5], max_tokens=1)
        harness.step()
        harness.now += 1.999
        harness.core.tick(harness.now)
    harness.submit(Outlet(), [5], max_tokens=1)
    assert refusal_of(harness, 5).retry_after_ms == pytest.approx(12_000, rel=0.05)


def test_a_queue_that_nobody_leaves_is_told_with_the_longest_wait() -> None:
    harness = Harness(capacity(max_num_seqs=1), max_queued_requests=1)
    harness.submit(Outlet(), [5], max_tokens=50)
    harness.step()
    harness.submit(Outlet(), [5])
    for _ in range(3):
        harness.now += 1.0
        harness.core.tick(harness.now)
    assert refusal_of(harness, 5).retry_after_ms == MAX_RETRY_MS


def test_the_queue_is_bounded_in_tokens_too() -> None:
    harness = Harness(capacity(max_num_seqs=1), max_queued_tokens=20)
    harness.submit(Outlet(), [5])
    harness.step()
    harness.submit(Outlet(), [12])
    assert refusal_of(harness, 9).reason is FailureReason.QUEUE_FULL
    (verdict,) = harness.submit(Outlet(), [8])
    assert verdict.refusal is None


def test_an_empty_queue_takes_a_request_above_the_token_bound() -> None:
    harness = Harness(capacity(), max_queued_tokens=20)
    (verdict,) = harness.submit(Outlet(), [30])
    assert verdict.refusal is None


def test_a_live_request_id_is_refused_and_free_again_after_the_end() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], request_id="a")
    assert refusal_of(harness, 5, request_id="a").reason is FailureReason.ALREADY_EXISTS
    harness.run_to_end()
    (verdict,) = harness.submit(Outlet(), [5], request_id="a")
    assert verdict.refusal is None


def test_a_refused_submit_leaves_nothing_behind() -> None:
    harness, outlet = Harness(capacity()), Outlet()
    verdicts = harness.submit(outlet, [5, 500])
    assert [v.refusal is not None for v in verdicts] == [True, True]
    assert not outlet.sequences
    assert harness.core.num_live == 0


def test_a_drained_core_refuses_and_lets_the_running_end() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5])
    harness.core.refuse_new(RequestError(FailureReason.DRAINING, "draining"))
    assert refusal_of(harness, 5).reason is FailureReason.DRAINING
    harness.run_to_end()
    harness.core.refuse_new(None)
    assert len(harness.streams[0].tokens) == 8


def test_refusals_do_not_gather_tracebacks() -> None:
    harness = Harness(capacity())
    harness.core.refuse_new(RequestError(FailureReason.DRAINING, "draining", retry_after_ms=7))
    first, second = refusal_of(harness, 5), refusal_of(harness, 5)
    assert first is not second
    assert (second.message, second.retry_after_ms) == ("draining", 7)


def test_before_the_first_worker_everything_is_refused() -> None:
    core, outlet = SchedulerCore(CoreConfig()), Outlet()
    (verdict,) = core.submit(submission(), outlet, 0.0)
    assert verdict.refusal is not None
    assert verdict.refusal.reason is FailureReason.UPSTREAM_LOST
    assert core.plan(0.0) is None


def test_each_sequence_has_its_own_seed() -> None:
    core, outlet = SchedulerCore(CoreConfig()), Outlet()
    core.worker_opened(capacity(), 0.0)
    sampling = SamplingSpec(seed=99, max_tokens=4)
    core.submit(submission(entry(), entry(stream_id=5), sampling=sampling), outlet, 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert [new.sampling.seed for new in plan.new_sequences] == [0, 5]


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_streams_go_on_after_the_worker_came_back(window: int) -> None:
    harness = Harness(capacity(), max_plans_in_flight=window)
    harness.submit(Outlet(), [5, 9, 4], max_tokens=12)
    for _ in range(5):
        harness.step()
    harness.plan()
    harness.lose_worker()
    load = harness.core.load()
    assert (load.num_running, load.num_waiting, load.is_worker_ready) == (0, 3, False)
    harness.open_epoch()
    harness.run_to_end()
    assert [len(harness.streams[n].tokens) for n in range(3)] == [12, 12, 12]


def test_a_sequence_that_was_running_at_two_losses_fails() -> None:
    harness = Harness(capacity(max_num_seqs=1))
    harness.submit(Outlet(), [5, 5], max_tokens=30)
    for _ in range(2):
        harness.step()
        harness.lose_worker()
        harness.open_epoch()
    assert end_of(harness, 0).failure is LOST
    harness.run_to_end()
    assert len(harness.streams[1].tokens) == 30


def test_a_loss_that_cannot_be_resumed_fails_what_was_running() -> None:
    harness = Harness(capacity(max_num_seqs=1))
    harness.submit(Outlet(), [5, 5])
    harness.step()
    harness.lose_worker(can_resume=False)
    assert end_of(harness, 0).failure is LOST
    assert harness.streams[1].end is None


def test_what_does_not_fit_the_next_worker_fails_and_the_rest_is_cut_to_it() -> None:
    harness = Harness(capacity(num_blocks=40))
    harness.submit(Outlet(), [40, 5], max_tokens=50)
    harness.step()
    harness.lose_worker()
    harness.sides[0].capacity = capacity(max_model_len=32)
    harness.open_epoch()
    failure = end_of(harness, 0).failure
    assert failure is not None
    assert failure.reason is FailureReason.CONTEXT_LENGTH_EXCEEDED
    harness.run_to_end()
    assert len(harness.streams[1].tokens) == 27
    assert end_of(harness, 1).finish_reason is FinishReason.LENGTH


def test_fail_all_ends_every_live_sequence() -> None:
    harness = Harness(capacity(max_num_seqs=1))
    harness.submit(Outlet(), [5, 5])
    harness.step()
    harness.core.fail_all(LOST, 0.0)
    harness.check()
    assert [end_of(harness, n).failure for n in (0, 1)] == [LOST, LOST]


# -- the snapshot --------------------------------------------------------------------------------


def test_counters_survive_an_epoch() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], max_tokens=4)
    harness.run_to_end()
    harness.lose_worker()
    harness.open_epoch()
    harness.submit(Outlet(), [6], max_tokens=4)
    harness.run_to_end()
    load = harness.core.load()
    assert load.num_prompt_tokens_total == 11
    assert load.num_output_tokens_total == 8
    assert load.num_steps_total == 8
    assert load.num_total_blocks == 16
    assert load.max_model_len == 64
    assert load.is_worker_ready


def test_stats_tell_steps_and_times() -> None:
    harness = Harness(capacity(max_num_batched_tokens=4))
    harness.submit(Outlet(), [10], max_tokens=4)
    harness.run_to_end()
    stats = end_of(harness, 0).stats
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_steps) == (10, 4, 6)
    assert (stats.queue_us, stats.prefill_us, stats.decode_us) == (0, 3000, 3000)


@pytest.mark.parametrize(("window", "idle_us"), [(1, 3 * 5000), (2, 0)])
def test_a_device_waits_between_steps_unless_a_plan_was_sent_ahead(
    window: int, idle_us: int
) -> None:
    harness = Harness(capacity(), max_plans_in_flight=window)
    harness.submit(Outlet(), [5], max_tokens=4)
    while harness.live():
        while harness.plan():
            pass
        harness.take_result()  # it took a millisecond
        if window == 1:
            harness.now += 0.005
    load = harness.core.load()
    assert load.step_us_total == pytest.approx(4000, abs=1)
    assert load.step_idle_us_total == pytest.approx(idle_us, abs=1)


def test_tokens_that_are_computed_once_more_are_counted() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], max_tokens=8)
    for _ in range(3):
        harness.step()
    harness.lose_worker()
    harness.open_epoch()
    harness.run_to_end()
    assert harness.core.load().num_recomputed_tokens_total == 8
