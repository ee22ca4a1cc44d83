import dataclasses
import random

import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, StepPlan, Tick, WorkerContractError
from services.scheduler.ticks import check_world, make_tick, needs_sweep, plan_step
from shared.endings import AbortReason
from shared.sampling import SamplingSpec
from tests.services.scheduler.builders import capacity, entry, submission
from tests.services.scheduler.harness import Harness
from tests.services.scheduler.simulated_worker import SimulatedWorker

LADDER = ((8, 3), (32, 1))


def world(**changes: int) -> list[Capacity]:
    return [
        dataclasses.replace(
            capacity(**changes), data_parallel_size=2, data_parallel_rank=rank, moe_methods=LADDER
        )
        for rank in range(2)
    ]


def start(capacities: list[Capacity], **config: int) -> SchedulerCore:
    core = SchedulerCore(CoreConfig(**config), num_replicas=len(capacities))
    for replica, one in enumerate(capacities):
        core.worker_opened(one, 0.0, replica)
    return core


def run(core: SchedulerCore, capacities: list[Capacity]) -> list[list[StepPlan]]:
    """Step until nothing is planned."""
    workers = [SimulatedWorker(one) for one in capacities]
    steps = []
    while (plans := plan_step(core, 0, capacities, 0.0)) is not None:
        steps.append(plans)
        for replica, (worker, plan) in enumerate(zip(workers, plans, strict=True)):
            core.take_result(worker.run(plan), 0.0, replica)
        core.check()
    return steps


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_every_replica_gets_a_plan_each_tick_and_all_ticks_are_alike(num_drafts: int) -> None:
    capacities = world(num_speculative_tokens=num_drafts)
    core = start(capacities)
    core.submit(submission(entry(stream_id=1), request_id="one"), Outlet(), 0.0)
    steps = run(core, capacities)
    assert core.num_live == 0
    assert len(steps) >= 2
    for plans in steps:
        assert len({plan.step for plan in plans}) == 1
        assert plans[0].tick == plans[1].tick is not None
        assert not plans[1].rows  # one request runs on one replica: a dummy step for the other


def test_a_world_without_work_makes_no_tick() -> None:
    capacities = world()
    assert plan_step(start(capacities), 0, capacities, 0.0) is None


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_sweep_tells_workers_at_rest_which_rows_ended(num_replicas: int) -> None:
    capacities = world() if num_replicas == 2 else [capacity()]
    core = start(capacities)
    outlet = Outlet()
    core.submit(submission(entry(stream_id=1)), outlet, 0.0)
    workers = [SimulatedWorker(one) for one in capacities]

    def step(plans: list[StepPlan] | None) -> list[StepPlan]:
        assert plans
        for replica, (worker, plan) in enumerate(zip(workers, plans, strict=True)):
            core.take_result(worker.run(plan), 0.0, replica)
        return plans

    def sweep() -> list[StepPlan] | None:
        return plan_step(core, 0, capacities, 0.0, is_sweep=True)

    started = step(plan_step(core, 0, capacities, 0.0))
    assert not needs_sweep(core, range(num_replicas)), "it runs"
    core.abort(outlet, 1, AbortReason.CANCELLED, 0, 0.0)
    assert workers[0].rows
    assert needs_sweep(core, range(num_replicas))
    assert plan_step(core, 0, capacities, 0.0) is None, "only when a sweep is due"
    plans = step(sweep())
    assert plans[0].freed_rows == started[0].rows
    assert not any(worker.rows for worker in workers)
    assert sweep() is None, "there is nothing left to say"
    core.check()


def test_a_window_of_two_holds_two_ticks() -> None:
    capacities = world()
    core = start(capacities, max_plans_in_flight=2)
    core.submit(submission(entry(40)), Outlet(), 0.0)
    assert plan_step(core, 0, capacities, 0.0)
    assert plan_step(core, 0, capacities, 0.0)
    assert plan_step(core, 0, capacities, 0.0) is None
    assert [core.num_in_flight_at(replica) for replica in (0, 1)] == [2, 2]


def test_a_group_that_is_alone_has_no_tick() -> None:
    core = start([capacity()])
    core.submit(submission(), Outlet(), 0.0)
    plans = plan_step(core, 0, [capacity()], 0.0)
    assert plans
    assert plans[0].tick is None


def plan(*scheduled: int) -> StepPlan:
    core = start([capacity()])
    core.submit(submission(), Outlet(), 0.0)
    found = core.plan(0.0)
    assert found
    return dataclasses.replace(
        found, rows=list(range(len(scheduled))), num_scheduled_tokens=list(scheduled)
    )


@pytest.mark.parametrize(
    ("scheduled", "num_drafts", "expected"),
    [
        (((), ()), 0, Tick(num_tokens=1, moe_method=3)),
        (((4, 4), (1,)), 0, Tick(num_tokens=8, moe_method=3)),
        (((), (9,)), 0, Tick(num_tokens=9, moe_method=1)),
        (((99,), ()), 0, Tick(num_tokens=99, moe_method=1)),
        (
            ((2, 2, 2), (2,)),
            1,
            Tick(num_tokens=6, moe_method=3, num_draft_passes=1, num_draft_rows=3),
        ),
        (((), ()), 3, Tick(num_tokens=1, moe_method=3, num_draft_passes=3, num_draft_rows=1)),
    ],
)
def test_a_tick_has_room_for_the_largest_replica(
    scheduled: tuple[tuple[int, ...], ...], num_drafts: int, expected: Tick
) -> None:
    (own, _) = world(num_speculative_tokens=num_drafts)
    assert make_tick([plan(*counts) for counts in scheduled], own) == expected


def test_workers_that_are_no_world_are_refused_by_place() -> None:
    good = world()
    check_world(good)
    check_world([capacity()])
    with pytest.raises(WorkerContractError, match="worker 0 says that it is replica 1 of 2"):
        check_world(good[::-1])
    with pytest.raises(WorkerContractError, match="replica 0 of 1, 0 of 2 expected"):
        check_world([capacity(), capacity()])
    with pytest.raises(WorkerContractError, match="replica 0 of 2, 0 of 1 expected"):
        check_world(good[:1])
    other = dataclasses.replace(good[1], moe_methods=((32, 1),))
    with pytest.raises(WorkerContractError, match="worker 1 has other moe_methods"):
        check_world([good[0], other])


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_streams_survive_worlds_that_are_lost_and_far_too_small(
    window: int, seed: int, num_drafts: int
) -> None:
    """The harness holds every plan and token against the contract and an undisturbed run."""
    dice = random.Random(seed)
    (own, _) = world(
        num_blocks=14,
        num_rows=16,
        max_num_seqs=8,
        max_model_len=40,
        max_num_batched_tokens=dice.choice([8, 24]) * (1 + num_drafts),
        num_speculative_tokens=num_drafts,
    )
    harness = Harness(own, num_replicas=2, max_plans_in_flight=window)
    outlet = Outlet()
    for _ in range(150):
        if len(harness.live()) < 16:
            harness.submit(outlet, [dice.randint(1, 9)], max_tokens=dice.randint(1, 30))
        live = [stream.seed for stream in harness.live()]
        if live and dice.random() < 0.05:
            harness.abort(dice.choice(live))
        if dice.random() < 0.02:
            for replica in (0, 1):  # a world is lost as a whole
                harness.lose_worker(replica=replica)
            for replica in (0, 1):
                harness.open_epoch(replica)
        _step(harness)
    for _ in range(5000):
        _step(harness)
        if not harness.live() and not any(side.results for side in harness.sides):
            break
    load = harness.core.load()
    assert not harness.live()
    assert load.num_free_blocks == load.num_total_blocks
    assert load.num_preemptions_total > 0


def _step(harness: Harness) -> None:
    while harness.tick():
        pass
    for replica, side in enumerate(harness.sides):
        if side.results:
            harness.take_result(replica)
    assert harness.core.num_in_flight_at(0) == harness.core.num_in_flight_at(1)


def test_a_tick_is_captured_where_no_replica_has_more_than_decodes() -> None:
    capacities = [
        dataclasses.replace(one, captured_num_seqs=(1, 2, 8))
        for one in world(num_speculative_tokens=1, max_num_seqs=16)
    ]
    core = start(capacities)
    for number in range(6):
        core.submit(submission(entry(4), request_id=f"r{number}"), Outlet(), 0.0)
    steps = run(core, capacities)
    seen = set()
    for plans in steps:
        tick = plans[0].tick
        assert tick is not None
        most = max(max(plan.num_scheduled_tokens, default=0) for plan in plans)
        rows = max(len(plan.rows) for plan in plans)
        if most > 2:
            assert tick.captured_num_seqs == 0
        else:
            assert tick.captured_num_seqs == min(size for size in (1, 2, 8) if size >= rows)
            assert tick.num_tokens == 2 * tick.captured_num_seqs
            # The method is that of the padded step, which is the one that was captured.
            assert tick.moe_method == (3 if tick.num_tokens <= 8 else 1)
        seen.add(tick.captured_num_seqs)
    assert {0, 8} <= seen


def test_a_step_larger_than_all_captured_ones_is_not_captured() -> None:
    capacities = [dataclasses.replace(one, captured_num_seqs=(1,)) for one in world()]
    core = start(capacities)
    for number in range(4):
        core.submit(submission(entry(1), request_id=f"r{number}"), Outlet(), 0.0)
    assert {
        plans[0].tick.captured_num_seqs for plans in run(core, capacities) if plans[0].tick
    } == {0}


def test_replicas_that_captured_other_sizes_are_no_world() -> None:
    first, second = world()
    with pytest.raises(WorkerContractError, match="worker 1 has other captured_num_seqs"):
        check_world([first, dataclasses.replace(second, captured_num_seqs=(4,))])


def test_a_long_prompt_alone_at_its_replica_does_not_stall_the_others_of_its_world() -> None:
    capacities = world(num_blocks=400, max_model_len=600, max_num_batched_tokens=64)
    core = start(capacities, long_prefill_token_threshold=16, prefill_schedule_interval=1)
    workers = [SimulatedWorker(one) for one in capacities]

    def step() -> list[int]:
        plans = plan_step(core, 0, capacities, 0.0)
        assert plans
        for replica, (worker, plan) in enumerate(zip(workers, plans, strict=True)):
            core.take_result(worker.run(plan), 0.0, replica)
        return sorted(sum(plan.num_scheduled_tokens) for plan in plans)

    long = SamplingSpec(max_tokens=30, eos_token_ids=())
    core.submit(submission(entry(5), request_id="short", sampling=long), Outlet(), 0.0)
    step()
    core.submit(submission(entry(300), request_id="long"), Outlet(), 0.0)
    assert [step() for _ in range(3)] == [[1, 16]] * 3
    core.abort_request("short", 0.0)
    assert step() == [0, 64], "nobody else is there"


def shares(interval: int, num_prompts: int = 24) -> tuple[float, int]:
    """Share of captured ticks, and ticks in all, while prompts come to a world that decodes."""
    capacities = [
        dataclasses.replace(one, captured_num_seqs=(16,))
        for one in world(num_blocks=400, max_num_seqs=16, num_rows=32, max_num_batched_tokens=64)
    ]
    core = start(capacities, prefill_schedule_interval=interval)
    workers = [SimulatedWorker(one) for one in capacities]
    ticks = []
    number = 0
    while True:
        # One every second step, to one replica after the other.
        if len(ticks) % 2 == 0 and number < num_prompts:
            core.submit(submission(entry(20), request_id=f"r{number}"), Outlet(), 0.0)
            number += 1
        plans = plan_step(core, 0, capacities, 0.0)
        if plans is None:
            break
        ticks.append(plans[0].tick)
        for replica, (worker, plan) in enumerate(zip(workers, plans, strict=True)):
            core.take_result(worker.run(plan), 0.0, replica)
        core.check()
    assert number == num_prompts
    assert core.num_live == 0
    captured = [tick for tick in ticks if tick and tick.captured_num_seqs]
    return len(captured) / len(ticks), len(ticks)


def test_prompts_of_all_replicas_come_in_the_same_ticks() -> None:
    alone, length = shares(1)
    aligned, aligned_length = shares(2)
    rare, _ = shares(4)
    assert alone < aligned < rare
    # What waits does so for a tick at most; the world is done as soon but for that.
    assert aligned_length <= length + 2


def test_a_prompt_waits_for_nobody_where_nobody_decodes() -> None:
    capacities = world(max_num_batched_tokens=64)
    core = start(capacities, prefill_schedule_interval=100)
    core.submit(submission(entry(1)), Outlet(), 0.0)
    plans = plan_step(core, 0, capacities, 0.0)
    assert plans is not None
    assert plans[0].rows


def test_prompts_of_every_replica_wait_for_nobody() -> None:
    capacities = world(max_num_seqs=8, num_rows=16, max_num_batched_tokens=8, num_blocks=200)
    core = start(capacities, prefill_schedule_interval=100)
    workers = [SimulatedWorker(one) for one in capacities]

    def step() -> list[StepPlan]:
        plans = plan_step(core, 0, capacities, 0.0)
        assert plans is not None
        for replica, (worker, plan) in enumerate(zip(workers, plans, strict=True)):
            core.take_result(worker.run(plan), 0.0, replica)
        return plans

    def submit(name: str, num_tokens: int) -> None:
        core.submit(submission(entry(num_tokens), request_id=name), Outlet(), 0.0)

    submit("a", 3)
    step()
    submit("b", 40)
    # The replica that decodes waits with nobody: the other one has the prompt alone, and waits.
    assert max(max(plan.num_scheduled_tokens, default=0) for plan in step()) == 1
    submit("c", 40)
    step()  # it is placed
    assert max(max(plan.num_scheduled_tokens, default=0) for plan in step()) > 1
