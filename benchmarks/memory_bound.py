"""Decode of one sequence by a model that no cache holds: how much of the memory's rate is used.

A random model of two layers as wide as GLM-5.2, 1.2 GB of which every token needs, in bfloat16 and
in W8A8. Each line has the bytes of the weights that a step reads over the time it takes, and that
over what the machine reads per second with as many threads, measured between the steps.

    python -m benchmarks.memory_bound [--schemes bf16 w8a8] [--threads 2] [--folder DIR]
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.decode_step import ROOT, build, measure
from benchmarks.int8_decode import quantize
from benchmarks.stream_rate import measure_stream
from benchmarks.synthetic_checkpoint import full_width_config, write_checkpoint

NUM_EXPERTS = 8
ROUNDS, STREAM_BYTES, STREAM_ROUNDS = 3, 1 << 28, 40
MUST, AIM = 0.6, 0.8
_ITEM_BYTES = {"BF16": 2, "F32": 4, "I8": 1, "I32": 4, "I64": 8}


def main(argv: list[str] | None = None) -> int:
    """Write the model, measure, print a line for each scheme."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="*", choices=["bf16", "w8a8"], default=["bf16", "w8a8"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of a kernel")
    parser.add_argument("--folder", type=Path, help="where to write it; default: a temporary one")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name) / "bf16"
        config = full_width_config(NUM_EXPERTS)
        write_checkpoint(folder, config)
        _add_tokenizer(folder)
        for scheme in args.schemes:
            model = Path(name) / scheme
            if scheme != "bf16":
                # Its rounding does not matter here, and a step takes a while.
                flags = ("--calibration-tokens", "64")
                if status := quantize(folder, model, scheme, *flags):
                    return status
            line = _measure(model, config["num_experts_per_tok"] / NUM_EXPERTS, args.threads)
            sys.stdout.write(json.dumps({"claim": "memory_bound", "scheme": scheme} | line) + "\n")
            sys.stdout.flush()
    return 0


def _measure(model: Path, share: float, threads: int) -> dict[str, object]:
    executor = build(model, 1, num_threads=threads)
    num_bytes = active_bytes(model, share)
    step_us, stream = 1 << 60, 0.0
    for _ in range(ROUNDS):
        stream = max(stream, measure_stream(STREAM_BYTES, threads, STREAM_ROUNDS))
        step_us = min(step_us, measure(executor, 1)["all"])
    rate = num_bytes / (step_us * 1e-6)
    return {
        "threads": threads,
        "active_mb": round(num_bytes / 1e6),
        "step_us": step_us,
        "gb_per_s": round(rate / 1e9, 1),
        "stream_gb_per_s": round(stream / 1e9, 1),
        "share": round(rate / stream, 2),
        "must": MUST,
        "aim": AIM,
    }


def active_bytes(model: Path, share: float) -> int:
    """Bytes of a checkpoint's tensors that one token needs.

    Args:
        model: Its folder.
        share: Of the routed experts that a token takes.
    """
    total = 0.0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dictionary
                total += _num_bytes(tensors, name) * _share_of(name, share)
    return int(total)


def _num_bytes(tensors: Any, name: str) -> int:  # noqa: ANN401  its methods have no types
    view = tensors.get_slice(name)
    count = 1
    for size in view.get_shape():
        count *= size
    return count * _ITEM_BYTES[view.get_dtype()]


def _share_of(name: str, share: float) -> float:
    if "embed_tokens" in name:
        return 0.0  # one row
    return share if ".experts." in name else 1.0


def _add_tokenizer(folder: Path) -> None:
    """The quantizer calibrates with text; the ids it gets mean nothing to random weights."""
    nano = ROOT / "models" / "glm-nano"
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "calibration.jsonl")
    for name in files:
        (folder / name).write_bytes((nano / name).read_bytes())


if __name__ == "__main__":
    sys.exit(main())
