"""Frames of event streams per second and core of the gateway, beside a peer that already runs.

    python -m benchmarks.sse --peer 8100     # the peer serves its model under the name `tiny`

What a frame costs is the CPU time, of user and system, of the processes between the scheduler and
the client: our frontend and detokenizer, and the peer's API server, which turns tokens into text
and frames as well. It is found by the port it listens on, or given by `--peer-pid`; its engine is
another process and not counted, and neither are our scheduler, worker and the client. Parsing and
tokenizing of the requests are in it, for both. A replay worker stands for the model, so the gateway
has as many frames to write as it can; a peer's frames come at the pace of its model, so with one
the same model is run here, too (`model_*`).
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.load import WARM_UP_SEED, LoadSpec, run_load
from benchmarks.mesh import Mesh, cpu_seconds, listener_pid, running_mesh
from benchmarks.random_model import make_random_model

ROOT = Path(__file__).resolve().parent.parent
GATEWAY = ("frontend", "detokenizer")
CONCURRENCY, TOKENS = 64, 128
# Processor time is counted in ticks of 10 ms: enough frames that one of them is no per cent.
REPLAY_REQUESTS, MODEL_REQUESTS = 1024, 128
MODEL_FLAGS = ("--max-num-seqs", "256", "--max-model-len", "4096")

CpuClock = Callable[[], Mapping[str, float]]


def main(argv: list[str] | None = None) -> int:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help="port of a running peer on 127.0.0.1")
    parser.add_argument("--peer-model", default="tiny", help="the peer's model name")
    parser.add_argument("--peer-pid", type=int, help="its API server, if the port does not tell")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    args = parser.parse_args(argv)
    line = {"claim": "sse", "concurrency": args.concurrency, **_replayed(args.concurrency)}
    if args.peer:
        peer_pid = args.peer_pid or listener_pid(args.peer)
        line |= {f"model_{name}": value for name, value in _modelled(args.concurrency).items()}
        spec = _spec(args.peer, args.peer_model, args.concurrency, MODEL_REQUESTS)
        peer = measure(spec, lambda: {"api_server": cpu_seconds(peer_pid)})
        line |= {f"peer_{name}": value for name, value in peer.items()}
        for kind in ("", "model_"):
            ours, theirs = line[f"{kind}frames_per_core_s"], line["peer_frames_per_core_s"]
            line[f"{kind}ratio"] = round(ours / max(theirs, 1), 2)
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


def measure(spec: LoadSpec, clock: CpuClock) -> dict[str, Any]:
    """Warm up, then run the load; what a frame cost by process and in all."""
    run_load(replace(spec, num_requests=spec.concurrency, seed=WARM_UP_SEED))
    before = clock()
    result = run_load(spec)
    after = clock()
    frames = max(result["frames"], 1)
    spent = {name: 1e6 * (after[name] - before[name]) / frames for name in after}
    us_per_frame = sum(spent.values())
    return {
        "frames": result["frames"],
        "frames_per_core_s": round(1e6 / max(us_per_frame, 1e-3)),
        "us_per_frame": round(us_per_frame, 2),
        "us_per_frame_by_process": {name: round(value, 2) for name, value in spent.items()},
        "frames_per_s": round(result["frames"] / max(result["wall_s"], 0.01), 1),
        "errors": result["errors"],
    }


def _replayed(concurrency: int) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "glm-nano" / "tokenizer.json"))
    ids = tokenizer.encode("river stone cloud " * TOKENS, add_special_tokens=False).ids
    # As ids: making tokens of an answer is no work that a gateway has with a model.
    replay: dict[str, object] = {"replay": {"token_ids": ids[:TOKENS]}}
    with running_mesh("--worker", "replay", "--served-model-name", "tiny") as mesh:
        spec = _spec(mesh.port, "tiny", concurrency, REPLAY_REQUESTS, replay)
        return measure(spec, lambda: _gateway_seconds(mesh))


def _modelled(concurrency: int) -> dict[str, Any]:
    """Behind the model that the peer has."""
    model = make_random_model(ROOT / ".bench" / "model", ROOT / "models" / "glm-nano")
    flags = ("--model", str(model), "--served-model-name", "tiny", *MODEL_FLAGS)
    with running_mesh(*flags) as mesh:
        spec = _spec(mesh.port, "tiny", concurrency, MODEL_REQUESTS)
        return measure(spec, lambda: _gateway_seconds(mesh))


def _gateway_seconds(mesh: Mesh) -> dict[str, float]:
    return {name: cpu_seconds(mesh.pids[name]) for name in GATEWAY}


def _spec(
    port: int, model: str, concurrency: int, count: int, extra: dict[str, object] | None = None
) -> LoadSpec:
    return LoadSpec(
        port=port,
        model=model,
        concurrency=concurrency,
        num_requests=count,
        max_tokens=TOKENS,
        extra=extra or {},
    )


if __name__ == "__main__":
    sys.exit(main())
