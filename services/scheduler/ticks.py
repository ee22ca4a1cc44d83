"""One step of a world: the replicas that share experts take it together, or none does.

Law: either every replica of a world gets a plan for a step, or no one does; the plans of a step
carry the same tick. A replica without rows steps all the same: the others meet it in every layer.
"""

import dataclasses
from collections.abc import Sequence

from services.scheduler.core import SchedulerCore
from services.scheduler.plan import Capacity, StepPlan, Tick, WorkerContractError


def plan_step(
    core: SchedulerCore,
    first: int,
    capacities: Sequence[Capacity],
    now: float,
    *,
    is_sweep: bool = False,
) -> list[StepPlan] | None:
    """The plans of the next step of a world, None when there is none to make now.

    Args:
        core: Of all worlds.
        first: Number of the world's first replica.
        capacities: Of its replicas.
        now: Seconds.
        is_sweep: A step without rows will do, to tell a worker which of its rows have ended.
    """
    if len(capacities) == 1:
        plan = core.plan(now, first)
        if plan is None and is_sweep and needs_sweep(core, [first]):
            plan = core.plan_nothing(first)
        return None if plan is None else [plan]
    replicas = range(first, first + len(capacities))
    takes_prompts = core.is_prompt_step(replicas)
    found = _plan_each(core, replicas, now, takes_prompts=takes_prompts)
    if not (takes_prompts or any(found)):
        found = _plan_each(core, replicas, now, takes_prompts=True)
    if not any(found) and not (is_sweep and needs_sweep(core, replicas)):
        return None
    plans = [plan or core.plan_nothing(r) for r, plan in zip(replicas, found, strict=True)]
    tick = make_tick(plans, capacities[0])
    return [dataclasses.replace(plan, tick=tick) for plan in plans]


def _plan_each(
    core: SchedulerCore, replicas: range, now: float, *, takes_prompts: bool
) -> list[StepPlan | None]:
    live = [core.num_live_at(replica) for replica in replicas]
    num_live = sum(live)
    return [
        core.plan(now, replica, takes_prompts=takes_prompts, has_peers=num_live > own)
        for replica, own in zip(replicas, live, strict=True)
    ]


def needs_sweep(core: SchedulerCore, replicas: Sequence[int]) -> bool:
    """Whether a world rests while one of its workers holds rows that have ended."""
    is_resting = not any(core.num_in_flight_at(r) or core.num_live_at(r) for r in replicas)
    return is_resting and any(map(core.is_left_over_at, replicas))


def make_tick(plans: Sequence[StepPlan], capacity: Capacity) -> Tick:
    """What the plans of one step agree on."""
    num_drafts = capacity.num_speculative_tokens
    num_seqs = _captured_num_seqs(plans, capacity)
    if num_seqs:
        num_tokens = num_seqs * (1 + num_drafts)
    else:
        # A replica without rows computes one token.
        num_tokens = max(1, *(sum(plan.num_scheduled_tokens) for plan in plans))
    return Tick(
        num_tokens=num_tokens,
        moe_method=_method(num_tokens, capacity),
        num_draft_passes=num_drafts,
        num_draft_rows=max(1, *(len(plan.rows) for plan in plans)) if num_drafts else 0,
        captured_num_seqs=num_seqs,
    )


def _captured_num_seqs(plans: Sequence[StepPlan], capacity: Capacity) -> int:
    """The smallest captured step that holds the plans of all replicas; 0 for none."""
    per_seq = 1 + capacity.num_speculative_tokens
    if any(max(plan.num_scheduled_tokens, default=0) > per_seq for plan in plans):
        return 0
    needed = max(len(plan.rows) for plan in plans)
    return next((size for size in capacity.captured_num_seqs if size >= needed), 0)


def check_world(capacities: Sequence[Capacity]) -> None:
    """Refuse replicas that do not form one world, in this order.

    Raises:
        WorkerContractError: It names the replica and what it says.
    """
    size = len(capacities)
    for place, capacity in enumerate(capacities):
        if (capacity.data_parallel_size, capacity.data_parallel_rank) != (size, place):
            raise WorkerContractError(
                f"worker {place} says that it is replica {capacity.data_parallel_rank} of "
                f"{capacity.data_parallel_size}, {place} of {size} expected"
            )
        if capacity.moe_methods != capacities[0].moe_methods:
            raise WorkerContractError(f"worker {place} has other moe_methods than worker 0")
        if capacity.captured_num_seqs != capacities[0].captured_num_seqs:
            raise WorkerContractError(f"worker {place} has other captured_num_seqs than worker 0")
        if size > 1 and not capacity.moe_methods:
            raise WorkerContractError(f"worker {place} has no moe_methods")


def _method(num_tokens: int, capacity: Capacity) -> int:
    for most, method in capacity.moe_methods:
        if num_tokens <= most:
            return method
    return capacity.moe_methods[-1][1]
