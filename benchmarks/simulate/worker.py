"""A replica's worker in simulated time: runs plans in order; its tokens follow from seeds."""

from array import array
from dataclasses import dataclass

from benchmarks.simulate.device_time import DeviceModel, StepWork
from benchmarks.simulate.traces import VOCABULARY
from services.scheduler.plan import FinishCode, StepPlan, StepResult


def output_token(seed: int, position: int) -> int:
    """The token that a sequence with `seed` has at an absolute position."""
    return (seed * 1_000_003 + position * 7919) % VOCABULARY


@dataclass(slots=True)
class _Row:
    seed: int
    num_prompt: int
    num_known: int
    num_wanted: int
    is_over: bool = False


class SimulatedReplica:
    """Rows of one epoch, and when its device is free again.

    Args:
        device: How long steps take.
        wanted: Answers' lengths by seed; a sequence ends there with an end-of-sequence token.
    """

    def __init__(self, device: DeviceModel, wanted: dict[int, int]) -> None:
        """Idle."""
        self.free_at = 0.0
        self.busy_s = 0.0
        self._device = device
        self._wanted = wanted
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan, arrives_at: float) -> tuple[float, StepResult]:
        """When the step of a plan is done, and its result."""
        for new in plan.new_sequences:
            seed, num_prompt = new.sampling.seed, len(new.prompt_token_ids)
            num_known = num_prompt + len(new.output_token_ids)
            self._rows[new.row] = _Row(seed, num_prompt, num_known, self._wanted[seed])
        work = _work_of(plan)
        result, counts, codes, tokens = self._sample(plan)
        began_at = max(arrives_at, self.free_at)
        wait_us = round((began_at - self.free_at) * 1e6)
        seconds = self._device.seconds(work)
        self.busy_s += seconds
        self.free_at = began_at + seconds
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        return self.free_at, StepResult(
            step=plan.step,
            rows=result,
            num_computed_tokens=list(plan.num_computed_tokens),
            num_sampled_tokens=counts,
            finish_codes=codes,
            token_ids=tokens,
            wait_us=min(wait_us, 2**31),
        )

    def _sample(self, plan: StepPlan) -> tuple[list[int], list[int], list[int], "array[int]"]:
        counts, codes, tokens = [], [], array("I")
        for row_number, computed, scheduled in zip(
            plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            row = self._rows[row_number]
            is_sampled = computed + scheduled >= row.num_known and not row.is_over
            counts.append(int(is_sampled))
            code = FinishCode.NONE
            if is_sampled:
                tokens.append(output_token(row.seed, row.num_known))
                row.num_known += 1
                if row.num_known - row.num_prompt >= row.num_wanted:
                    row.is_over, code = True, FinishCode.EOS
            codes.append(int(code))
        return list(plan.rows), counts, codes, tokens


def _work_of(plan: StepPlan) -> StepWork:
    num_tokens = sum(plan.num_scheduled_tokens)
    num_decoding = plan.num_scheduled_tokens.count(1)
    of_prompts = of_rows = 0.0
    for computed, count in zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True):
        if count == 1:
            of_rows += computed + 1
        else:
            of_prompts += count * (computed + count / 2)
    return StepWork(
        num_rows=len(plan.rows),
        num_tokens=num_tokens,
        num_context_tokens=round(of_rows + of_prompts),
        num_prompt_tokens=num_tokens - num_decoding,
        num_prompt_context_tokens=round(of_prompts),
    )
