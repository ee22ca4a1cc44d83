"""What a token costs on its way through the mesh, CPU time with 64 running requests.

The claim is about the hop alone: wire conversion, gRPC, event loops and threads of both processes,
by the doors and clients of the services with nothing behind them (`benchmarks.hop_ends`). That is
what 52 us were measured for in the peers' manner, a stream per request and a message per token; the
same run measures that manner again, under gRPC's defaults. Steps follow each other as fast as they
are taken, as for the 52 us; `paced_*` has 100 steps a second, where every message wakes threads
that sleep. Each figure is the lesser of two.

`whole_processes_us_per_token_and_hop` is the wider figure: the CPU time of all four processes of a
mesh with the replay worker, text work, one socket write per frame and client, parsing and
tokenizing of requests included, over tokens and three hops. The client is not counted.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load import LoadSpec, run_load
from benchmarks.mesh import running_mesh
from services.launcher.commands import GRPC_SWITCHES, GRPC_VARIABLE

PEER_US = 52.0  # a message per token over grpc.aio with uvloop, measured on two cores
CONCURRENCY, TOKENS, REQUESTS = 64, 256, 256
HOPS = ("worker", "scheduler", "detokenizer")
NUM_STEPS, NUM_PACED_STEPS, GAP_S = 1000, 200, 0.01
REPEATS = 2
LIMIT_S = 60.0


def main() -> int:
    """Print the line."""
    ours = {hop: _least(hop, GRPC_SWITCHES) for hop in HOPS}
    paced = {hop: _least(hop, GRPC_SWITCHES, GAP_S) for hop in HOPS}
    manner = _least("token_messages", "")
    per_hop = round(sum(ours.values()) / len(HOPS), 2)
    line = {
        "claim": "hop_cost",
        "running": CONCURRENCY,
        "us_per_token_and_hop": per_hop,
        "us_per_token_by_hop": ours,
        "must_us": 10.0,
        "aim_us": 5.0,
        "peer_us": PEER_US,
        "message_per_token_us": manner,
        "ratio": round(per_hop / manner, 3),
        "paced_us_per_token_and_hop": round(sum(paced.values()) / len(HOPS), 2),
        "paced_message_per_token_us": _least("token_messages", "", GAP_S),
        **_whole_processes(),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


def _least(hop: str, switches: str, gap_s: float = 0.0) -> float:
    return min(_measure(hop, switches, gap_s) for _ in range(REPEATS))


def _measure(hop: str, switches: str, gap_s: float) -> float:
    """CPU microseconds of both processes per token."""
    num_steps = NUM_PACED_STEPS if gap_s else NUM_STEPS
    environment = {**os.environ, GRPC_VARIABLE: switches}
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 's'}"

        def command(end: str) -> list[str]:
            numbers = [str(num_steps), str(gap_s), str(CONCURRENCY)]
            return [sys.executable, "-m", "benchmarks.hop_ends", end, hop, address, *numbers]

        server = subprocess.Popen(
            command("server"), stdout=subprocess.PIPE, env=environment, text=True
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n", f"the server of hop {hop} did not start"
            client = subprocess.run(
                command("client"),
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                timeout=LIMIT_S,
                check=True,
            )
            lines = (client.stdout, server.stdout.readline())
            spent = sum(float(json.loads(text)["cpu_s"]) for text in lines)
        finally:
            server.kill()
            server.wait()
    return round(1e6 * spent / (num_steps * CONCURRENCY), 2)


def _whole_processes() -> dict[str, Any]:
    """The same of all that the four processes do."""
    text = "river stone cloud " * (TOKENS // 2)  # two tokens or more for each three words
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
    return {
        "whole_processes_us_per_token_and_hop": round(sum(per_service.values()) / len(HOPS), 2),
        "us_per_token_by_service": per_service,
        "tokens_per_s": result["tokens_per_s"],
        "errors": result["errors"],
    }


if __name__ == "__main__":
    sys.exit(main())
