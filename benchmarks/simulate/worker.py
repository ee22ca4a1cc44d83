"""The workers of a world in simulated time: run plans in order; tokens follow from seeds.

A world is what steps together: one replica, or several that share experts. The latter take a step
in the time of the slowest of them, with the sizes that the plans' tick says.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.simulate.device_time import DeviceModel, StepWork
from benchmarks.simulate.traces import VOCABULARY
from services.scheduler.plan import FinishCode, StepPlan, StepResult

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX: Final = 0xBF58476D1CE4E5B9


def output_token(seed: int, position: int) -> int:
    """The token that a sequence with `seed` has at an absolute position."""
    return (seed * 1_000_003 + position * 7919) % VOCABULARY


def luck(seed: int, position: int) -> float:
    """A number between 0 and 1 that follows from both, as if it were drawn."""
    mixed = ((seed * _GOLDEN) ^ (position * _MIX)) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 31)) * _GOLDEN) & (2**64 - 1)
    return (mixed >> 11) / 2**53


@dataclass(slots=True)
class _Row:
    seed: int
    num_prompt: int
    num_known: int
    num_wanted: int
    num_computed: int
    num_drafts: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _Columns:
    """What a result says of its rows."""

    num_sampled: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)


class SimulatedReplica:
    """Rows of one epoch.

    Args:
        wanted: Answers' lengths by seed; a sequence ends there with an end-of-sequence token.
        acceptance: Share of steps in which the first, second, ... draft is kept; one per draft.
    """

    def __init__(self, wanted: dict[int, int], acceptance: Sequence[float] = ()) -> None:
        """No rows."""
        self._wanted = wanted
        self._acceptance = acceptance
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """The result of a plan."""
        for new in plan.new_sequences:
            seed, num_prompt = new.sampling.seed, len(new.prompt_token_ids)
            num_known = num_prompt + len(new.output_token_ids)
            self._rows[new.row] = _Row(
                seed, num_prompt, num_known, self._wanted[seed], new.num_computed_tokens
            )
        columns = _Columns()
        for number, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True):
            self._advance(self._rows[number], count, columns)
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        has_drafts = bool(self._acceptance)
        return StepResult(
            step=plan.step,
            rows=list(plan.rows),
            num_computed_tokens=list(plan.num_computed_tokens),
            num_sampled_tokens=columns.num_sampled,
            finish_codes=columns.codes,
            token_ids=columns.token_ids,
            num_drafted_tokens=columns.num_drafted if has_drafts else [],
            num_accepted_tokens=columns.num_accepted if has_drafts else [],
        )

    def _advance(self, row: _Row, num_scheduled: int, columns: _Columns) -> None:
        """Compute so many tokens of a row, drafts among them; sample behind the last known one."""
        drafted = accepted = num_sampled = 0
        code = FinishCode.NONE
        if not row.is_over:
            num_new = min(num_scheduled, row.num_known - row.num_computed)
            drafted = min(row.num_drafts, num_scheduled - num_new)
            accepted = min(drafted, self._num_kept(row))
            row.num_computed += num_new + accepted
            row.num_drafts = 0
            if row.num_computed >= row.num_known:
                num_left = row.num_prompt + row.num_wanted - row.num_known
                num_sampled = min(1 + accepted, num_left)
                for position in range(row.num_known, row.num_known + num_sampled):
                    columns.token_ids.append(output_token(row.seed, position))
                row.num_known += num_sampled
                row.num_drafts = len(self._acceptance)
                if num_sampled == num_left:
                    row.is_over, code = True, FinishCode.EOS
        columns.num_sampled.append(num_sampled)
        columns.codes.append(int(code))
        columns.num_drafted.append(drafted)
        columns.num_accepted.append(min(accepted, num_sampled))

    def _num_kept(self, row: _Row) -> int:
        """Drafts that turn out right."""
        drawn = luck(row.seed, row.num_known)
        return sum(drawn < share for share in self._acceptance)


class SimulatedWorld:
    """Replicas that step together, and when their devices are free again.

    Args:
        device: How long steps take.
        replicas: In their order.
    """

    def __init__(self, device: DeviceModel, replicas: Sequence[SimulatedReplica]) -> None:
        """Idle."""
        self.free_at = 0.0
        self.busy_s = 0.0
        self._device = device
        self._replicas = replicas

    def run(self, plans: Sequence[StepPlan], arrives_at: float) -> tuple[float, list[StepResult]]:
        """When the step of all plans is done, and its results."""
        began_at = max(arrives_at, self.free_at)
        wait_us = min(round((began_at - self.free_at) * 1e6), 2**31)
        seconds = max(map(self._device.seconds, works_of(plans, self._device)))
        self.busy_s += seconds
        self.free_at = began_at + seconds
        results = [
            dataclasses.replace(replica.run(plan), wait_us=wait_us)
            for replica, plan in zip(self._replicas, plans, strict=True)
        ]
        return self.free_at, results


def works_of(plans: Sequence[StepPlan], device: DeviceModel) -> list[StepWork]:
    """What each replica of a world computes in a step."""
    num_drafts = device.capacity.num_speculative_tokens
    works = [_work_of(plan, num_drafts) for plan in plans]
    if len(plans) == 1:
        return works
    num_world_tokens = sum(work.num_tokens for work in works)
    return [
        _of_world(work, plan, num_drafts, num_world_tokens)
        for work, plan in zip(works, plans, strict=True)
    ]


def _of_world(work: StepWork, plan: StepPlan, num_drafts: int, num_world_tokens: int) -> StepWork:
    """The same with what the others of the world bring, and the sizes of the tick."""
    tick = plan.tick
    assert tick is not None, "replicas that step together have a tick"
    captured = tick.captured_num_seqs * (1 + num_drafts)
    return dataclasses.replace(
        work,
        num_padded_tokens=max(0, captured - work.num_tokens),
        num_world_tokens=num_world_tokens,
        num_exchanged_tokens=tick.num_tokens,
        num_draft_passes=tick.num_draft_passes,
        is_eager=not captured,
    )


def _work_of(plan: StepPlan, num_drafts: int) -> StepWork:
    """A row with no more tokens than a decoding one may have counts as one."""
    num_tokens = sum(plan.num_scheduled_tokens)
    of_prompts = of_rows = 0.0
    num_prompt_tokens = 0
    for computed, count in zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True):
        if count <= 1 + num_drafts:
            of_rows += count * (computed + 1)
        else:
            of_prompts += count * (computed + count / 2)
            num_prompt_tokens += count
    return StepWork(
        num_rows=len(plan.rows),
        num_tokens=num_tokens,
        num_context_tokens=round(of_rows + of_prompts),
        num_prompt_tokens=num_prompt_tokens,
        num_prompt_context_tokens=round(of_prompts),
        num_draft_passes=num_drafts,
    )
