"""Replicas together: loss of any at any point, and caches of different sizes."""

import dataclasses

import pytest

from services.scheduler.outlet import Outlet
from shared.endings import FinishReason
from shared.errors import FailureReason
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.harness import Harness

# In blocks of four tokens; the first one is nobody's.
LARGE, SMALL = 17, 6


def uneven(*num_blocks: int) -> Harness:
    return Harness(capacity(), num_replicas=len(num_blocks), num_blocks=num_blocks)


def where(harness: Harness) -> list[int]:
    return [harness.core.num_live_at(replica) for replica in range(len(harness.sides))]


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("lost_after", range(1, 12))
def test_whichever_replica_is_lost_at_whichever_step_no_token_is_lost_or_doubled(
    lost_after: int, window: int, is_joint: bool
) -> None:
    """Chunks of prompts, decoding rows and ends; each of three replicas is lost once."""
    for lost in range(3):
        limits = dataclasses.replace(
            capacity(max_num_batched_tokens=8, num_speculative_tokens=1), moe_methods=((64, 1),)
        )
        harness = Harness(limits, num_replicas=3, is_joint=is_joint, max_plans_in_flight=window)
        harness.submit(Outlet(), [5, 9, 17, 3, 5, 9], max_tokens=9, fork=0)
        for _ in range(lost_after):
            harness.step()
        harness.lose_worker(replica=lost)
        assert harness.is_open != is_joint
        assert harness.core.load().replicas[lost].num_cached_blocks == 0
        harness.check_names()  # placement knows nothing of what was there
        for _ in range(2):
            harness.step()
        harness.open_epoch(lost)
        harness.run_to_end()  # the harness compares every token with an undisturbed run
        ends = [stream.end for stream in harness.streams.values()]
        assert all(end and end.finish_reason is FinishReason.LENGTH for end in ends)


def test_a_replica_that_is_back_takes_sequences_but_none_for_what_its_lost_caches_held() -> None:
    harness, outlet = uneven(LARGE, LARGE), Outlet()
    harness.submit(outlet, [40], fork=0, max_tokens=1)
    for _ in range(6):
        harness.step()
    (home,) = [n for n, one in enumerate(harness.core.load().replicas) if one.num_cached_blocks]
    harness.submit(outlet, [40], fork=0, max_tokens=2)
    harness.plan(home)
    assert where(harness)[home] == 1, "it goes where its start is"
    harness.lose_worker(replica=home)
    harness.open_epoch(home)
    harness.run_to_end()
    hits = [one.num_prefix_cache_hits_total for one in harness.core.load().replicas]
    harness.submit(outlet, [9] * 4, max_tokens=2)
    harness.plan(home)
    assert min(where(harness)) > 0, "both take sequences"
    harness.run_to_end()
    assert harness.core.load().replicas[home].num_prefix_cache_hits_total == hits[home]


def test_a_long_sequence_goes_only_where_all_of_it_has_room() -> None:
    harness, outlet = uneven(SMALL, LARGE), Outlet()
    harness.submit(outlet, [5] * 3, max_tokens=30)
    harness.submit(outlet, [5], max_tokens=8)
    harness.plan(0)
    assert where(harness) == [1, 3]
    harness.run_to_end()
    lengths = [len(stream.tokens) for stream in harness.streams.values()]
    assert lengths == [30, 30, 30, 8]


def test_what_fits_the_larger_replica_alone_waits_for_it_though_the_smaller_one_is_idle() -> None:
    harness, outlet = uneven(SMALL, LARGE), Outlet()
    harness.submit(outlet, [5] * 5, max_tokens=30)
    harness.plan(1)
    assert where(harness) == [0, 4]
    assert harness.core.load().num_waiting == 1
    harness.run_to_end()
    assert all(len(stream.tokens) == 30 for stream in harness.streams.values())


def test_one_that_drains_takes_what_no_other_could_ever_hold() -> None:
    harness, outlet = uneven(SMALL, LARGE), Outlet()
    harness.core.drain_replica(1, harness.now, is_draining=True)
    harness.submit(outlet, [5], max_tokens=8)
    harness.submit(outlet, [5], max_tokens=30)
    harness.plan(0)
    assert where(harness) == [1, 1]
    harness.run_to_end()


def test_a_sequence_that_outgrew_the_replicas_that_are_left_fails_with_both_reasons() -> None:
    harness, outlet = uneven(SMALL, LARGE), Outlet()
    harness.submit(outlet, [30], max_tokens=20)
    harness.submit(outlet, [5], max_tokens=30)
    for _ in range(5):
        harness.step()
    assert where(harness) == [0, 2]
    harness.lose_worker(replica=1)
    end = harness.streams[0].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.reason is FailureReason.UPSTREAM_LOST
    assert "lost; of the replicas that are left" in end.failure.message
    assert "KV blocks, the worker has 5" in end.failure.message
    harness.run_to_end()
    # It had room for what it was by then, and ends where the smaller cache does.
    shorter = harness.streams[1]
    assert shorter.end is not None
    assert shorter.end.finish_reason is FinishReason.LENGTH
    assert len(shorter.tokens) == 4 * (SMALL - 1) - 5


def test_what_may_enter_is_what_the_largest_replica_that_stands_can_hold() -> None:
    harness, outlet = uneven(SMALL, LARGE), Outlet()
    assert harness.core.load().max_model_len == 64
    harness.lose_worker(replica=1)
    assert harness.core.load().max_model_len == 20
    (verdict,) = harness.submit(outlet, [30])
    assert verdict.refusal is not None
    assert verdict.refusal.reason is FailureReason.KV_CAPACITY_EXCEEDED
    harness.open_epoch(1)
    assert harness.core.load().max_model_len == 64
    harness.submit(outlet, [30])
    harness.run_to_end()


def test_without_any_replica_nobody_is_judged_by_size() -> None:
    harness, outlet = uneven(SMALL, LARGE), Outlet()
    harness.submit(outlet, [30], max_tokens=8)
    harness.lose_worker(replica=0)
    harness.lose_worker(replica=1)
    assert len(harness.live()) == 1
    harness.open_epoch(1)
    harness.open_epoch(0)
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 8
