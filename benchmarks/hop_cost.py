"""CPU time of the mesh per token and hop with 64 running requests, without a model.

The replay worker emits one token per step and request. A token takes three hops (worker to
scheduler to detokenizer to frontend); what the client costs is not counted.
"""

import json
import sys

from benchmarks.load import LoadSpec, run_load
from benchmarks.mesh import running_mesh

PEER_US = 52.0  # a message per token over grpc.aio with uvloop, measured on two cores
CONCURRENCY, TOKENS, REQUESTS, HOPS = 64, 256, 256, 3


def main() -> int:
    """Print the line."""
    text = "river stone cloud " * TOKENS
    with running_mesh("--worker", "replay", "--served-model-name", "tiny") as mesh:
        spec = LoadSpec(
            port=mesh.port,
            model="tiny",
            concurrency=CONCURRENCY,
            num_requests=REQUESTS,
            max_tokens=TOKENS,
            extra={"replay": {"text": text}},
        )
        run_load(spec)  # warm up
        before = mesh.cpu_seconds()
        result = run_load(spec)
        after = mesh.cpu_seconds()
    tokens = max(result["tokens"], 1)
    per_service = {name: round(1e6 * (after[name] - before[name]) / tokens, 2) for name in after}
    per_hop = round(sum(per_service.values()) / HOPS, 2)
    line = {
        "claim": "hop_cost",
        "running": CONCURRENCY,
        "us_per_token_and_hop": per_hop,
        "peer_us": PEER_US,
        "ratio": round(per_hop / PEER_US, 3),
        "must_us": 10.0,
        "us_per_token_by_service": per_service,
        "tokens_per_s": result["tokens_per_s"],
        "errors": result["errors"],
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
