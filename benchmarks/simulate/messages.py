"""What a message between two processes takes: its way, and the time of the process at its end.

Measured, not modelled: plans and results of a step go to and fro over the channel of the mesh
(`shared/rpc.py`, uvloop, gRPC's switches as the launcher sets them) between two processes that do
nothing else. Conversion from and to messages is not in it; the simulator measures that for itself.

    python -m benchmarks.simulate.messages
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import uvloop

from services.launcher.commands import GRPC_SWITCHES, GRPC_VARIABLE
from shared.rpc import build_server, open_channel

# About a plan of 64 decoding rows.
MESSAGE_BYTES: Final = 600
NUM_ROUNDS: Final = 400
# The first ones meet cold caches.
NUM_FIRST: Final = 20
# As far apart as steps are, so that each message wakes threads that sleep; and at once.
GAPS_S: Final = (0.01, 0.0)
_METHOD: Final = "/simulate.Echo/Connect"


async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    """Send back whatever comes."""
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request)


async def serve(address: str) -> None:
    """The worker's side, until its input ends."""
    server = build_server(address=address)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("simulate.Echo", {"Connect": handler}),)
    )
    await server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def ask(address: str, num_rounds: int) -> list[dict[str, float]]:
    """The scheduler's side: a line for each gap."""
    async with open_channel(address) as channel:
        call = channel.stream_stream(_METHOD)()
        found = [await _rounds(call, gap_s, num_rounds) for gap_s in GAPS_S]
        call.cancel()
    return found


async def _rounds(
    call: grpc.aio.StreamStreamCall, gap_s: float, num_rounds: int
) -> dict[str, float]:
    took: list[float] = []
    cpu_s = 0.0
    for number in range(NUM_FIRST + num_rounds):
        await asyncio.sleep(gap_s)
        before, cpu_before = time.perf_counter(), time.process_time()
        await call.write(bytes(MESSAGE_BYTES))
        await call.read()
        if number >= NUM_FIRST:
            took.append(time.perf_counter() - before)
            cpu_s += time.process_time() - cpu_before
    return {
        "gap_ms": 1000 * gap_s,
        "one_way_us": round(1e6 * statistics.median(took) / 2, 1),
        "one_way_us_p90": round(1e6 * sorted(took)[int(0.9 * len(took))] / 2, 1),
        "cpu_us_per_message": round(1e6 * cpu_s / num_rounds / 2, 1),
    }


def measure(num_rounds: int = NUM_ROUNDS) -> dict[str, object]:
    """Start both sides; what they took."""
    environment = {**os.environ, GRPC_VARIABLE: GRPC_SWITCHES}
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 's'}"
        command = [sys.executable, "-m", "benchmarks.simulate.messages"]
        server = subprocess.Popen(
            [*command, "serve", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n", "the server did not start"
            client = subprocess.run(
                [*command, "ask", address, str(num_rounds)],
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                timeout=60,
                check=True,
            )
        finally:
            server.kill()
            server.communicate()
    return {"claim": "messages", "bytes": MESSAGE_BYTES, "found": json.loads(client.stdout)}


def main(argv: list[str]) -> int:
    """Measure, or be one of the sides."""
    if argv[:1] == ["serve"]:
        uvloop.run(serve(argv[1]))
    elif argv[:1] == ["ask"]:
        sys.stdout.write(json.dumps(uvloop.run(ask(argv[1], int(argv[2])))) + "\n")
    else:
        sys.stdout.write(json.dumps(measure()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
