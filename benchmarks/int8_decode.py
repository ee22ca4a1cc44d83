"""A decode step with int8 weights beside the same step in bfloat16, in the worker's executor.

For glm-nano and each number of sequences a line with both steps. They are taken in turn, step by
step, so that what else the machine does meets both alike; each step counts with the best of its
rounds, and the figure is their mean. 1 or more: int8 is at least as fast.

    python -m benchmarks.int8_decode [--scheme w8a8] [--sequences 1 16 64]
"""

import argparse
import json
import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.decode_step import ROOT, build, decode
from services.worker.kv_cache import KVCaches
from services.worker.model_executor import ModelExecutor

MODEL = ROOT / "models" / "glm-nano"
FEWEST_ROUNDS, MOST_ROUNDS = 4, 12
SEQUENCES_IN_ROUNDS = 512  # short steps are disturbed by more, in proportion, and cost less


def main(argv: list[str] | None = None) -> int:
    """Quantize, then measure both in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="w8a8", help="w8a8 or w4a8c8")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 16, 64, 256])
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    quantized = ROOT / ".bench" / f"{MODEL.name}-{args.scheme}"
    if status := quantize(MODEL, quantized, args.scheme):
        return status
    for count in args.sequences:
        best = compare({"bf16": build(MODEL, count), args.scheme: build(quantized, count)}, count)
        line = {
            "claim": "int8_decode",
            "sequences": count,
            "step_us": {name: round(us) for name, us in best.items()},
            "speed_over_bf16": round(best["bf16"] / best[args.scheme], 2),
            "must": 1.0,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def compare(executors: Mapping[str, ModelExecutor[KVCaches]], count: int) -> dict[str, float]:
    """Mean time of a step in each executor, in microseconds; of each step its best round."""
    times: defaultdict[str, list[list[int]]] = defaultdict(list)
    rounds = min(max(SEQUENCES_IN_ROUNDS // count, FEWEST_ROUNDS), MOST_ROUNDS)
    for _ in range(rounds):
        steps = zip(*(decode(executor, count) for executor in executors.values()), strict=True)
        for name, taken in zip(executors, zip(*steps, strict=True), strict=True):
            times[name].append([one["all"] for one in taken])
    return {
        name: fmean(min(step) for step in zip(*taken, strict=True)) for name, taken in times.items()
    }


def quantize(source: Path, target: Path, scheme: str, *flags: str) -> int:
    """Write a checkpoint in `scheme`; the exit status of the quantizer."""
    words = [str(source), str(target), "--scheme", scheme, "--overwrite", "--log-level", "warning"]
    words += flags
    command = [sys.executable, "-P", "-m", "services.worker.quant", *words]
    return subprocess.call(command, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
