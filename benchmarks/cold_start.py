"""From `glm-mesh up` to the first token of glm-nano, environment ready, files in the page cache."""

import json
import sys
import time

from benchmarks.load import LoadSpec, run_load
from benchmarks.mesh import running_mesh

PEER_S, MUST_S, ROUNDS = 35.0, 10.0, 3  # vLLM 0.32 CPU, same measure


def main() -> int:
    """Print the line: median of a few starts."""
    times = []
    for _ in range(ROUNDS):
        with running_mesh("--served-model-name", "glm-nano") as mesh:
            ready = time.perf_counter() - mesh.started_s
            spec = LoadSpec(
                port=mesh.port,
                model="glm-nano",
                concurrency=1,
                num_requests=1,
                prompt_words=4,
                max_tokens=1,
            )
            result = run_load(spec)
        times.append(ready + result["ttft_ms_p50"] / 1e3)
    median = sorted(times)[len(times) // 2]
    line = {
        "claim": "cold_start",
        "seconds": round(median, 2),
        "peer_s": PEER_S,
        "ratio": round(median / PEER_S, 3),
        "must_s": MUST_S,
        "all_seconds": [round(t, 2) for t in times],
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
