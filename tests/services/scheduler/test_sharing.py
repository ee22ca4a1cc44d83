"""What sequences that begin alike save each other, seen from outside of the core."""

import pytest

from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, StepPlan
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.harness import Harness


def shared(**changes: int) -> Harness:
    options = {name: changes.pop(name) for name in ("max_plans_in_flight",) if name in changes}
    return Harness(capacity(**changes), **options)


def chunks(plan: StepPlan | None) -> list[tuple[int, int]]:
    """First position and tokens of each row."""
    assert plan is not None
    return list(zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True))


def ends(harness: Harness) -> list[int]:
    """Cached tokens that the ends told, by stream."""
    found = [stream.end for stream in harness.streams.values()]
    return [end.stats.num_cached_tokens for end in found if end]


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    harness = shared()
    harness.submit(Outlet(), [14], fork=0)
    harness.run_to_end()
    harness.submit(Outlet(), [14, 16], fork=0)
    assert chunks(harness.plan()) == [(12, 2), (12, 4)]
    harness.run_to_end()
    assert ends(harness) == [0, 12, 12]
    load = harness.core.load()
    assert load.num_prefix_cache_queries_total == 14 + 14 + 16
    assert load.num_prefix_cache_hits_total == 24
    assert load.replicas[0].num_prefix_cache_hits_total == 24
    assert load.num_cached_blocks == load.replicas[0].num_cached_blocks > 3


def test_siblings_start_after_the_prompt_of_the_first_one() -> None:
    harness = shared(max_num_batched_tokens=64)
    harness.submit(Outlet(), [14] * 4, fork=0)
    assert chunks(harness.plan()) == [(0, 14)]
    harness.take_result()
    assert chunks(harness.plan()) == [(14, 1), (12, 2), (12, 2), (12, 2)]
    harness.run_to_end()
    assert ends(harness) == [0, 12, 12, 12]


def test_siblings_follow_a_long_prompt_chunk_by_chunk_and_compute_nothing_twice() -> None:
    harness = shared(max_num_batched_tokens=10, max_model_len=64)
    harness.submit(Outlet(), [30, 30], fork=0, max_tokens=2)
    harness.run_to_end()
    first, second = (0, 28)
    assert ends(harness) == [first, second]
    assert sum(sum(plan.num_scheduled_tokens) for plan in harness.plans) == 30 + 1 + 2 + 1


def test_a_block_that_lacks_its_last_token_is_not_shared_yet() -> None:
    harness = shared(max_num_batched_tokens=7)
    harness.submit(Outlet(), [9, 9], fork=0)
    assert chunks(harness.plan()) == [(0, 7)]
    harness.take_result()
    assert chunks(harness.plan()) == [(7, 2)]
    harness.take_result()
    assert chunks(harness.plan()) == [(9, 1), (8, 1)]
    harness.run_to_end()


def test_short_prompts_without_a_full_block_start_together() -> None:
    harness = shared()
    harness.submit(Outlet(), [4, 4, 3], fork=0)
    assert chunks(harness.plan()) == [(0, 4), (0, 4), (0, 3)]


def test_who_waits_for_a_prompt_on_its_way_lets_others_pass() -> None:
    harness = shared()
    harness.submit(Outlet(), [14, 14], fork=0)
    harness.submit(Outlet(), [6])
    assert chunks(harness.plan()) == [(0, 14), (0, 6)]
    harness.run_to_end()


@pytest.mark.parametrize("window", [1, 2])
def test_a_prompt_whose_leader_is_aborted_is_computed_by_who_waited(window: int) -> None:
    harness = shared(max_plans_in_flight=window)
    harness.submit(Outlet(), [14, 14], fork=0)
    harness.plan()
    harness.abort(0)
    harness.take_result()
    assert chunks(harness.plan())[0] == (0, 14)
    harness.run_to_end()
    assert harness.streams[1].end is not None
    assert harness.streams[1].end.stats.num_cached_tokens == 0


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    harness = shared()
    outlet = Outlet()
    harness.submit(outlet, [9], fork=0, max_tokens=8)
    harness.run_to_end()
    # As a client would send it: the answer is a part of the prompt. 16 of 17 tokens are computed.
    turn = harness.resubmit(0, outlet, num_more=6)
    assert chunks(harness.plan()) == [(16, 7)]
    harness.run_to_end()
    end = harness.streams[turn].end
    assert end is not None
    assert end.stats.num_cached_tokens == 16


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    harness = shared(num_blocks=9, max_model_len=32)
    harness.submit(Outlet(), [9, 8], max_tokens=20)
    while not harness.core.load().num_preemptions_total:
        harness.step()
    while (plan := harness.plan()) is None or not plan.new_sequences:
        harness.take_result()
    assert plan.new_sequences[0].num_computed_tokens > 0
    harness.run_to_end()
    # What it found of itself is nothing that a client was spared.
    assert ends(harness) == [0, 0]
    assert harness.core.load().num_prefix_cache_hits_total == 0


def test_what_was_used_last_is_kept_longest() -> None:
    harness = shared(num_blocks=9)  # 8 blocks
    for fork in (1, 2, 1, 3):
        harness.submit(Outlet(), [9], fork=fork, max_tokens=1)
        harness.run_to_end()
    assert ends(harness) == [0, 0, 8, 0]
    # Three prompts are six named blocks; four further ones push out those used first.
    harness.submit(Outlet(), [13], max_tokens=1)
    harness.run_to_end()
    for fork in (1, 3):
        harness.submit(Outlet(), [9], fork=fork, max_tokens=1)
        harness.run_to_end()
    assert ends(harness)[-2:] == [8, 8]


@pytest.mark.parametrize("window", [1, 2])
def test_a_lost_worker_takes_its_cache_with_it(window: int) -> None:
    harness = shared(max_plans_in_flight=window)
    harness.submit(Outlet(), [14], fork=0)
    harness.run_to_end()
    assert harness.core.load().num_cached_blocks
    harness.lose_worker()
    assert not harness.core.load().num_cached_blocks
    harness.open_epoch()
    harness.submit(Outlet(), [14], fork=0)
    assert chunks(harness.plan()) == [(0, 14)]
    assert harness.core.load().num_prefix_cache_queries_total == 28, "counters go on"
    harness.run_to_end()


def test_a_sequence_that_failed_alone_leaves_nothing_behind() -> None:
    harness = shared()
    harness.submit(Outlet(), [14], fork=0)
    harness.step()
    harness.core.tidy()
    assert harness.core.load().num_cached_blocks == 3
    harness.plan()
    (result,) = harness.results
    result.token_ids.pop()
    result.num_sampled_tokens[0] = result.finish_codes[0] = 0
    error = RequestError(FailureReason.NUMERICAL_ERROR, "nan")
    result.row_failures[result.rows[0]] = error
    harness.worker.rows[result.rows[0]].is_over = True
    harness.take_result()
    assert harness.core.load().num_cached_blocks == 0


def test_after_a_reset_running_sequences_go_on_and_new_ones_compute() -> None:
    harness = shared()
    harness.submit(Outlet(), [14], fork=0, max_tokens=12)
    harness.step()
    harness.reset_cache()
    harness.submit(Outlet(), [14], fork=0)
    assert chunks(harness.plan()) == [(14, 1), (0, 14)]
    harness.run_to_end()
    assert ends(harness) == [0, 0]
    # What was computed after it is shared again.
    harness.submit(Outlet(), [14], fork=0)
    assert chunks(harness.plan()) == [(12, 2)]


def test_a_stop_string_keeps_what_was_computed() -> None:
    harness = shared()
    harness.submit(Outlet(), [9], fork=0, max_tokens=20)
    for _ in range(6):
        harness.step()
    harness.abort(0, AbortReason.STOP_STRING, kept=1)
    harness.run_to_end()
    assert harness.core.load().num_cached_blocks == 3


def test_without_the_option_nothing_is_shared() -> None:
    harness = Harness(capacity(), enable_prefix_caching=False)
    harness.submit(Outlet(), [14, 14], fork=0)
    assert chunks(harness.plan()) == [(0, 14), (0, 14)]
    harness.run_to_end()
    assert ends(harness) == [0, 0]
    assert harness.core.load().num_prefix_cache_queries_total == 0


def test_more_siblings_than_are_passed_in_a_step_all_start_in_one() -> None:
    harness = shared(num_blocks=200, max_num_seqs=64, num_rows=128, max_num_batched_tokens=256)
    harness.submit(Outlet(), [14] * 40, fork=0)
    harness.step()
    assert len(chunks(harness.plan())) == 40


def test_each_replica_knows_what_it_holds() -> None:
    harness = Harness(capacity(), num_replicas=2)
    outlet = Outlet()
    harness.submit(outlet, [14], fork=0)
    harness.run_to_end()
    harness.submit(outlet, [15], fork=0)
    waiting = outlet.sequences[1]
    batches = [replica.batch for replica in harness.core._replicas]
    hits = [len(batch.cache.find(waiting)) for batch in batches if batch]
    assert sorted(hits) == [0, 3]
    harness.run_to_end()


def test_drafts_that_were_kept_are_shared_and_others_are_not() -> None:
    small = Capacity(
        num_blocks=40,
        block_size_tokens=4,
        num_rows=8,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        num_speculative_tokens=3,
    )
    harness = Harness(small)
    outlet = Outlet()
    harness.submit(outlet, [9], fork=0, max_tokens=20)
    harness.run_to_end()
    harness.check_names()
    # 29 tokens, all but the last one in the cache.
    turn = harness.resubmit(0, outlet, num_more=2)
    harness.run_to_end()
    end = harness.streams[turn].end
    assert end is not None
    assert end.stats.num_cached_tokens == 28
