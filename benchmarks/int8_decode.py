"""A decode step with int8 weights beside the same step in bfloat16, in the worker's executor.

For glm-nano and each number of sequences a line with both steps, best of the steps, taken in turn.
1 or more: int8 is at least as fast.

    python -m benchmarks.int8_decode [--scheme w8a8] [--sequences 1 16 64]
"""

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path

from benchmarks.decode_step import ROOT, build, measure

MODEL = ROOT / "models" / "glm-nano"
ROUNDS = 3


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
        plain, packed = build(MODEL, count), build(quantized, count)
        times: dict[str, list[int]] = {"bf16": [], args.scheme: []}
        for _ in range(ROUNDS):
            times["bf16"].append(measure(plain, count)["all"])
            times[args.scheme].append(measure(packed, count)["all"])
        best = {name: min(found) for name, found in times.items()}
        line = {
            "claim": "int8_decode",
            "sequences": count,
            "step_us": best,
            "speed_over_bf16": round(best["bf16"] / best[args.scheme], 2),
            "must": 1.0,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def quantize(source: Path, target: Path, scheme: str, *flags: str) -> int:
    """Write a checkpoint in `scheme`; the exit status of the quantizer."""
    words = [str(source), str(target), "--scheme", scheme, "--overwrite", "--log-level", "warning"]
    words += flags
    command = [sys.executable, "-P", "-m", "services.worker.quant", *words]
    return subprocess.call(command, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
