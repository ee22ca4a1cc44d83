"""How long the device waits between steps: one plan in flight, and two.

The CPU mesh on the sizes of the serving race, decoding; the worker tells for how long it waited for
each plan, the scheduler counts that where there was work (`glm_mesh:step_idle_seconds_total`).

    python -m benchmarks.step_ahead [--concurrency 16]
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path

from benchmarks.load import LoadSpec, run_load
from benchmarks.mesh import running_mesh
from benchmarks.random_model import make_random_model

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("glm_mesh:step_idle_seconds_total", "glm_mesh:step_seconds_total")


def measure(window: int, concurrency: int, num_requests: int) -> dict[str, float]:
    """Share of the time that the device waited, and tokens per second."""
    model = make_random_model(ROOT / ".bench" / "model", ROOT / "models" / "glm-nano")
    flags = ["--model", str(model), "--served-model-name", "tiny", "--max-model-len", "4096"]
    flags += ["--async-scheduling"] if window == 2 else []
    with running_mesh(*flags) as mesh:
        spec = LoadSpec(
            port=mesh.port, model="tiny", concurrency=concurrency, num_requests=num_requests
        )
        run_load(spec)  # warm up
        before = _read(mesh.port)
        answer = run_load(spec)
        after = _read(mesh.port)
    idle_s, busy_s = (end - start for start, end in zip(before, after, strict=True))
    return {
        "idle_share": round(idle_s / max(1e-9, idle_s + busy_s), 4),
        "tokens_per_s": answer["tokens_per_s"],
        "gap_ms_p50": answer["gap_ms_p50"],
    }


def _read(port: int) -> list[float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [float(values[name]) for name in NAMES]


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    args = parser.parse_args()
    one, two = (measure(window, args.concurrency, args.requests) for window in (1, 2))
    line = {"claim": "step_ahead", "concurrency": args.concurrency, "one_plan": one}
    line |= {"two_plans": two, "target_idle_share": 0.01}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
