"""Loading a checkpoint of GLM-5.2's matrix sizes: bytes per second and memory beside the weights.

`python -m benchmarks.loading [--gib 3] [--folder DIR]`: each way of reading, with the file in the
page cache and dropped from it. Every run is a process of its own; the peak is what it held at most.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.synthetic_checkpoint import full_width_config, num_experts_for, write_checkpoint

MODES = ("lazy", "prefetch", "eager")
GIB = 1 << 30


def main(argv: list[str] | None = None) -> int:
    """Write, load in each way, print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write it; default: a temporary one")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.mode:
        sys.stdout.write(json.dumps(load_once(args.folder, args.mode)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        config = full_width_config(num_experts_for(int(args.gib * GIB)))
        num_bytes = write_checkpoint(folder, config, num_files=4)
        runs = {
            f"{mode}_{state}": _run(folder, mode, state == "cold")
            for mode in MODES
            for state in ("warm", "cold")
        }
    line = {"claim": "loading", "gib": round(num_bytes / GIB, 2), "cores": os.cpu_count()}
    sys.stdout.write(json.dumps(line | runs) + "\n")
    return 0


def _run(folder: Path, mode: str, is_cold: bool) -> dict[str, float]:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            if is_cold:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while stream.read(16 << 20):
                    pass
    command = [sys.executable, "-m", "benchmarks.loading", "--folder", str(folder), "--mode", mode]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(out.stdout)
    return result


def load_once(folder: Path, mode: str, **settings: int) -> dict[str, float]:
    """Load in this process; rate and memory beside the weights."""
    import torch  # noqa: PLC0415  # only the loading process needs it

    from services.worker import ops  # noqa: PLC0415  # as above
    from services.worker.loading.load import load_model  # noqa: PLC0415
    from services.worker.loading.progress import LoadProgress  # noqa: PLC0415
    from services.worker.loading.strategy import LoadStrategy, ReadMode  # noqa: PLC0415
    from services.worker.model.config import ModelConfig  # noqa: PLC0415
    from services.worker.model.spec import ModelSpec  # noqa: PLC0415

    torch.set_num_threads(1)
    ops.register()
    device = torch.device("cpu")
    spec = ModelSpec(config=ModelConfig.from_dir(folder), dtype=torch.bfloat16, device=device)
    seen: list[LoadProgress] = []
    before = _peak_bytes()
    started = time.perf_counter()
    load_model(folder, spec, LoadStrategy(mode=ReadMode(mode), **settings), seen.append)
    seconds = time.perf_counter() - started
    peak = _peak_bytes() - before
    num_bytes = seen[-1].num_bytes
    return {
        "gb_per_s": round(num_bytes / seconds / 1e9, 2),
        "seconds": round(seconds, 2),
        "mib_beside_weights": round((peak - num_bytes) / (1 << 20)),
    }


def _peak_bytes() -> int:
    """Most that this program held; `ru_maxrss` would count what its process ran before it, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
