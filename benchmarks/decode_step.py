"""Where a decode step's time goes: the worker's executor alone, without processes around it.

For each number of sequences a line with the step's parts in microseconds, best of the steps, each
operator called from Python and as recorded; and what the kernels of the record took.

    python -m benchmarks.decode_step [--model DIR] [--dtype bfloat16] [--sequences 1 64]
"""

import argparse
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_model import make_random_model
from services.worker.graphs.recorded_model import RecordedModel
from services.worker.kv_cache import KVCaches
from services.worker.model_build import build_model_executor
from services.worker.model_executor import ModelExecutor
from services.worker.plan import NewSequence, StepPlan
from services.worker.settings import WorkerSettings
from shared.sampling import SamplingSpec

ROOT = Path(__file__).resolve().parent.parent
PROMPT, STEPS, KV_BYTES = 96, 60, 1 << 30
_NOBODY = np.empty(0, np.uint32)


def main(argv: list[str] | None = None) -> int:
    """Measure both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint; default: that of the serving race")
    parser.add_argument("--dtype", default="auto", help="as of the worker")
    parser.add_argument("--threads", type=int, default=0, help="of a kernel; 0: one per core")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 16, 64, 256])
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    model = args.model or make_random_model(
        ROOT / ".bench" / "model", ROOT / "models" / "glm-nano"
    )  # fmt: skip
    for count in args.sequences:
        flags = {"dtype": args.dtype, "num_threads": args.threads}
        called = measure(build(model, count, enforce_eager=True, **flags), count)
        recorded = build(model, count, **flags)
        line = {
            "claim": "decode_step",
            "model": model.name,
            "sequences": count,
            "called_us": called,
            "recorded_us": measure(recorded, count),
            "kernels_us": kernels(recorded, count),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def build(model: Path, count: int, **flags: Any) -> ModelExecutor[KVCaches]:  # noqa: ANN401
    """A worker's executor in this process."""
    settings = WorkerSettings(
        address="unix:/unused",
        model=model,
        max_num_seqs=count,
        max_model_len=512,
        kv_cache_memory_bytes=KV_BYTES,
        **flags,
    )
    executor = build_model_executor(settings, model)
    assert isinstance(executor, ModelExecutor)
    return executor


def measure(executor: ModelExecutor[KVCaches], count: int) -> dict[str, int]:
    """Least time of each part of a decode step of `count` sequences."""
    parts = list(decode(executor, count))
    return {name: min(one[name] for one in parts) for name in parts[0]}


def decode(executor: ModelExecutor[KVCaches], count: int) -> Iterator[dict[str, int]]:
    """Decode `count` sequences from their prompts on; yields the time of each part of each step."""
    executor.start_epoch(1)
    _prefill(executor, count)
    rows = np.arange(count)
    for index in range(STEPS):
        plan = _plan(count + 1 + index, rows, np.full(count, PROMPT + index), scheduled=1)
        started = time.perf_counter_ns()
        timings = executor.execute(plan, 0).timings
        total = (time.perf_counter_ns() - started) // 1000
        yield {
            "prepare": timings.prepare_us,
            "forward": timings.forward_us,
            "sample": timings.sample_us,
            "all": total,
        }


def kernels(executor: ModelExecutor[KVCaches], count: int) -> dict[str, float]:
    """Least time of the kernels of a recorded step, by the operators they belong to."""
    model = executor._decoder
    if not isinstance(model, RecordedModel):
        return {}
    total: defaultdict[str, float] = defaultdict(float)
    for operator, seconds in model.measure(count):
        total[operator] += seconds * 1e6
    ranked = sorted(total.items(), key=lambda entry: -entry[1])
    return {name: round(us, 1) for name, us in ranked}


def _prefill(executor: ModelExecutor[KVCaches], count: int) -> None:
    chance = np.random.default_rng(0)
    blocks_per_row = -(-(PROMPT + STEPS) // executor.capacity.block_size)
    for row in range(count):
        new = NewSequence(
            row=row,
            request_id=f"r{row}",
            prompt_token_ids=chance.integers(3, 800, PROMPT).astype(np.uint32),
            output_token_ids=_NOBODY,
            num_computed_tokens=0,
            sampling=SamplingSpec(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True),
        )
        first = 1 + row * blocks_per_row
        blocks = np.arange(first, first + blocks_per_row, dtype=np.uint32)
        at = np.array([row])
        plan = _plan(
            row + 1, at, np.zeros(1, np.int64), scheduled=PROMPT, blocks=blocks, new=(new,)
        )
        executor.execute(plan, 0)


def _plan(
    step: int,
    rows: "np.ndarray",
    computed: "np.ndarray",
    *,
    scheduled: int,
    blocks: "np.ndarray" = _NOBODY,
    new: tuple[NewSequence, ...] = (),
) -> StepPlan:
    return StepPlan(
        step=step,
        rows=rows,
        num_scheduled_tokens=np.full(len(rows), scheduled),
        num_computed_tokens=computed,
        num_new_blocks=np.full(len(rows), len(blocks)),
        new_blocks=blocks,
        new_sequences=new,
    )


if __name__ == "__main__":
    sys.exit(main())
