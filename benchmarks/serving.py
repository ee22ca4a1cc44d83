"""Decode through HTTP and SSE on the sizes of the race, in turn with a peer that already runs.

    python -m benchmarks.serving --peer 8100     # the peer serves its model under the name `tiny`

One line per concurrency: tokens per second and time to first token of both, and the ratios.
Without a peer the line compares with the peer's figures from the design, measured elsewhere.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.load import WARM_UP_SEED, LoadSpec, run_load
from benchmarks.mesh import running_mesh
from benchmarks.random_model import make_random_model

ROOT = Path(__file__).resolve().parent.parent
# vLLM 0.32 CPU on another two-core machine: tokens per second, milliseconds to the first token.
KNOWN_PEER = {1: (68.0, 38.0), 16: (740.0, None), 64: (1197.0, 782.0), 256: (1539.0, None)}
KV_BYTES = 2 << 30
REQUESTS = {1: 8, 16: 48, 64: 192, 256: 512}


def main(argv: list[str] | None = None) -> int:
    """Run the race."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help="port of a running peer on 127.0.0.1")
    parser.add_argument("--peer-model", default="tiny", help="the peer's model name")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--flag", action="append", default=[], help="one more flag for `up`")
    args = parser.parse_args(argv)
    model = make_random_model(ROOT / ".bench" / "model", ROOT / "models" / "glm-nano")
    flags = ["--model", str(model), "--served-model-name", "tiny", "--max-num-seqs", "256"]
    flags += ["--max-model-len", "4096", "--max-num-batched-tokens", "2048"]
    flags += ["--kv-cache-memory-bytes", str(KV_BYTES), *args.flag]  # as the peer has
    with running_mesh(*flags) as mesh:
        _measure(mesh.port, "tiny", 16, 32, seed=WARM_UP_SEED)
        if args.peer:
            _measure(args.peer, args.peer_model, 16, 32, seed=WARM_UP_SEED)
        for concurrency in args.concurrency:
            count = REQUESTS.get(concurrency, 3 * concurrency)
            before = mesh.cpu_seconds()
            ours = _measure(mesh.port, "tiny", concurrency, count)
            after = mesh.cpu_seconds()
            peer = _measure(args.peer, args.peer_model, concurrency, count) if args.peer else None
            cpu = {name: round(after[name] - before[name], 2) for name in after}
            sys.stdout.write(json.dumps(_line(concurrency, ours, peer, cpu)) + "\n")
            sys.stdout.flush()
    return 0


def _measure(
    port: int, model: str, concurrency: int, count: int, seed: int | None = None
) -> dict[str, Any]:
    spec = LoadSpec(
        port=port,
        model=model,
        concurrency=concurrency,
        num_requests=count,
        seed=concurrency if seed is None else seed,
    )
    return run_load(spec)


def _line(
    concurrency: int,
    ours: dict[str, Any],
    peer: dict[str, Any] | None,
    cpu: dict[str, Any],
) -> dict[str, object]:
    known_rate, known_ttft = KNOWN_PEER.get(concurrency, (None, None))
    peer_rate = peer["tokens_per_s"] if peer else known_rate
    peer_ttft = peer["ttft_ms_p50"] if peer else known_ttft
    return {
        "claim": "serving",
        "concurrency": concurrency,
        "tokens_per_s": ours["tokens_per_s"],
        "peer_tokens_per_s": peer_rate,
        "rate_ratio": round(ours["tokens_per_s"] / peer_rate, 2) if peer_rate else None,
        "rate_ratio_must": 2.0,
        "ttft_ms_p50": ours["ttft_ms_p50"],
        "peer_ttft_ms_p50": peer_ttft,
        "ttft_ratio": round(ours["ttft_ms_p50"] / peer_ttft, 3) if peer_ttft else None,
        "ttft_ratio_must": 0.5,
        "is_peer_measured_now": peer is not None,
        "errors": ours["errors"],
        "cpu_s": cpu,
        "detail": ours,
        "peer_detail": peer,
    }


if __name__ == "__main__":
    sys.exit(main())
