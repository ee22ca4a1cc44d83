"""Several replicas under one core: placement, loss of one, what they must have in common."""

import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.outlet import Outlet
from services.scheduler.plan import WorkerContractError
from shared.endings import FinishReason
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.harness import Harness


def two(**config: int) -> Harness:
    return Harness(capacity(), num_replicas=2, **config)


def test_sequences_are_spread_and_all_run_to_their_end() -> None:
    harness = two()
    harness.submit(Outlet(), [5] * 8)
    harness.plan(0)
    assert [harness.core.num_live_at(replica) for replica in (0, 1)] == [4, 4]
    harness.run_to_end()
    ends = [stream.end for stream in harness.streams.values()]
    assert all(end and end.finish_reason is FinishReason.LENGTH for end in ends)


def test_a_long_prompt_makes_a_replica_the_second_choice() -> None:
    harness = two()
    harness.submit(Outlet(), [40])
    harness.submit(Outlet(), [5])
    harness.submit(Outlet(), [5])
    harness.plan(0)
    assert [harness.core.num_live_at(replica) for replica in (0, 1)] == [1, 2]


def test_a_sequence_is_bound_to_a_replica_only_when_one_has_room() -> None:
    harness = two()
    harness.submit(Outlet(), [5] * 8, max_tokens=40)
    harness.submit(Outlet(), [5])
    harness.plan(0)
    harness.plan(1)
    assert [harness.core.num_live_at(replica) for replica in (0, 1)] == [4, 4]
    assert harness.core.load().num_waiting == 1
    harness.take_result(1)
    on_second = [s for s in harness.streams.values() if not s.end][4:8]
    harness.abort(on_second[0].seed)
    harness.plan(1)
    assert harness.core.num_live_at(1) + harness.core.num_live_at(0) == 8


def test_what_ran_on_a_lost_replica_goes_on_at_the_other_without_a_gap() -> None:
    harness = two()
    harness.submit(Outlet(), [5] * 4, max_tokens=20)
    for _ in range(4):
        harness.step()
    before = [len(stream.tokens) for stream in harness.streams.values()]
    assert min(before) > 0
    harness.lose_worker(replica=0)
    assert harness.is_open
    harness.run_to_end()  # the harness compares every token with an undisturbed run
    assert all(len(stream.tokens) == 20 for stream in harness.streams.values())
    assert not harness.sides[0].is_open


def test_what_was_placed_but_did_not_run_moves_too_and_loses_no_try() -> None:
    harness = two()
    harness.submit(Outlet(), [5] * 2)
    harness.core.plan(harness.now, 0)  # places both
    harness.lose_worker(replica=1)
    harness.lose_worker(replica=0)
    harness.open_epoch(1)
    harness.run_to_end()
    ends = [stream.end for stream in harness.streams.values()]
    assert all(end and end.failure is None for end in ends)


def test_the_load_is_that_of_all_replicas() -> None:
    harness = two()
    total = harness.core.load().num_total_blocks
    harness.submit(Outlet(), [5] * 2)
    harness.step()
    load = harness.core.load()
    assert (total, load.num_running, load.num_steps_total) == (32, 2, 2)
    assert [one.num_running for one in load.replicas] == [1, 1]
    assert [one.num_total_blocks for one in load.replicas] == [16, 16]
    harness.lose_worker(replica=0)
    load = harness.core.load()
    assert load.num_total_blocks == 16
    assert load.num_steps_total == 2
    assert load.is_worker_ready
    assert [one.is_ready for one in load.replicas] == [False, True]
    harness.lose_worker(replica=1)
    assert not harness.core.load().is_worker_ready


@pytest.mark.parametrize(
    "changes", [{"max_model_len": 32}, {"block_size_tokens": 2}, {"num_speculative_tokens": 1}]
)
def test_a_replica_on_which_the_others_sequences_could_not_go_on_is_refused(
    changes: dict[str, int],
) -> None:
    core = SchedulerCore(CoreConfig(), num_replicas=2)
    core.worker_opened(capacity(), 0.0, 0)
    with pytest.raises(WorkerContractError, match="replica 0 has"):
        core.worker_opened(capacity(**changes), 0.0, 1)
    core.check()
    core.worker_opened(capacity(num_blocks=25), 0.0, 1)


def test_the_load_tells_what_is_left_to_compute_and_the_room_of_those_that_take_requests() -> None:
    harness = two()
    harness.submit(Outlet(), [40, 5], max_tokens=4)
    harness.plan(0)
    load = harness.core.load()
    assert load.num_running == 1
    assert load.num_catch_up_tokens == 40 - 32, "a step takes 32 tokens of the long prompt"
    assert (load.max_num_seqs, load.max_num_batched_tokens) == (8, 64)
    harness.core.drain_replica(1, harness.now, is_draining=True)
    load = harness.core.load()
    assert (load.max_num_seqs, load.max_num_batched_tokens) == (4, 32)
    harness.run_to_end()
