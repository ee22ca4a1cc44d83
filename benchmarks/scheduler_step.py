"""What one decode step costs the scheduler: plan, update and deliveries of the core alone.

Every running sequence gets one token per step from synthetic results; blocks are allocated as the
sequences grow. The peer's numbers are the medians of vLLM 0.32 on two cores for the same step
(0.73 / 3.4 / 17.1 ms at 64 / 256 / 1024 running; block size 16). Wire conversion is told apart,
and what is done while the worker computes: full blocks get their names (`tidy_ms`).

    python -m benchmarks.scheduler_step [--steps 300]
"""

import argparse
import gc
import json
import statistics
import time
from array import array

from protos.glm.v1 import worker_pb2
from services.scheduler.core import SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import SequenceSubmit, Submission
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, StepPlan, StepResult
from services.scheduler.server import delivery_to_proto
from services.scheduler.worker_client import plan_to_proto, result_from_proto
from shared.sampling import SamplingSpec
from shared.wire import pack_ids

PEER_MS = {64: 0.73, 256: 3.4, 1024: 17.1}
# Least and aimed share of the peer's cost.
MUST, AIM = 0.25, 0.1


def start(num_running: int, block_size: int) -> SchedulerCore:
    """A core with `num_running` sequences past their prompts."""
    capacity = Capacity(
        num_blocks=num_running * 40_000 // block_size,
        block_size_tokens=block_size,
        num_rows=2 * num_running,
        max_num_seqs=num_running,
        max_num_batched_tokens=65_536,
        max_model_len=32_768,
        vocab_size=200_000,
    )
    core, outlet = SchedulerCore(CoreConfig()), Outlet()
    core.worker_opened(capacity, 0.0)
    for number in range(num_running):
        # Prompts of different lengths, so that blocks fill at different steps.
        prompt = array("I", range(48 + number % block_size))
        entry = SequenceSubmit(
            stream_id=number,
            index=0,
            prompt_token_ids=prompt,
            output_token_ids=array("I"),
            seed=number,
        )
        core.submit(
            Submission(
                request_id=f"r{number}",
                sequences=(entry,),
                sampling=SamplingSpec(max_tokens=30_000),
            ),
            outlet,
            0.0,
        )
    while not take_one_step(core, num_running):
        pass
    return core


def take_one_step(core: SchedulerCore, num_running: int) -> bool:
    """One untimed step; whether every sequence decoded in it."""
    plan = core.plan(0.0)
    assert plan is not None
    core.take_result(answer(plan), 0.0)
    core.take_deliveries()
    core.tidy()
    return len(plan.rows) == num_running and max(plan.num_scheduled_tokens) == 1


def answer(plan: StepPlan) -> StepResult:
    """One token for every row, as a worker would send it."""
    count = len(plan.rows)
    return StepResult(
        step=plan.step,
        rows=list(plan.rows),
        num_computed_tokens=list(plan.num_computed_tokens),
        num_sampled_tokens=[1] * count,
        token_ids=array("I", range(1000, 1000 + count)),
        finish_codes=[0] * count,
    )


class Stopwatch:
    """Milliseconds of wall time of one part, over many steps."""

    def __init__(self) -> None:
        """No samples."""
        self.samples: list[float] = []
        self._before = 0

    def __enter__(self) -> None:
        """Start."""
        self._before = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        """Note the time since the start."""
        self.samples.append((time.perf_counter_ns() - self._before) / 1e6)

    @property
    def median_ms(self) -> float:
        """The typical sample."""
        return statistics.median(self.samples)


def measure(num_running: int, steps: int, block_size: int) -> dict[str, object]:
    """Medians over `steps` steps."""
    core = start(num_running, block_size)
    planning, updating, converting = Stopwatch(), Stopwatch(), Stopwatch()
    tidying = Stopwatch()
    for _ in range(steps):
        with planning:
            plan = core.plan(1.0)
        assert plan is not None
        result = answer(plan)
        with updating:
            core.take_result(result, 1.0)
            deliveries = core.take_deliveries()
        with tidying:
            core.tidy()
        data = encoded(result)
        with converting:
            plan_to_proto(plan).SerializeToString()
            result_from_proto(worker_pb2.RunStepsResponse.FromString(data).result)
            for _, delivery in deliveries:
                delivery_to_proto(delivery).SerializeToString()
    pairs = zip(planning.samples, updating.samples, strict=True)
    total_ms = statistics.median(map(sum, pairs))
    return {
        "claim": "scheduler_step",
        "running": num_running,
        "block_size": block_size,
        "plan_ms": round(planning.median_ms, 4),
        "update_ms": round(updating.median_ms, 4),
        "total_ms": round(total_ms, 4),
        "wire_ms": round(converting.median_ms, 4),
        "tidy_ms": round(tidying.median_ms, 4),
        "peer_ms": PEER_MS[num_running],
        "ratio": round(total_ms / PEER_MS[num_running], 4),
        "target": MUST,
        "aim": AIM,
    }


def encoded(result: StepResult) -> bytes:
    """The bytes in which a worker's result arrives."""
    return worker_pb2.RunStepsResponse(
        result=worker_pb2.StepResult(
            step=result.step,
            rows=result.rows,
            num_computed_tokens=result.num_computed_tokens,
            num_sampled_tokens=result.num_sampled_tokens,
            sampled_token_ids=pack_ids(result.token_ids),
            finish_codes=result.finish_codes,  # type: ignore[arg-type]  # enums are ints there
        )
    ).SerializeToString()


def main() -> None:
    """Print one JSON line per number of running sequences."""
    parser = argparse.ArgumentParser(description="scheduler cost per decode step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--block-size", type=int, default=16, help="the peer was measured with 16")
    arguments = parser.parse_args()
    for num_running in PEER_MS:
        gc.collect()
        gc.freeze()
        print(json.dumps(measure(num_running, arguments.steps, arguments.block_size)), flush=True)


if __name__ == "__main__":
    main()
