"""The two ends of each hop, in one process: what one makes the other counts."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.hop_ends import CLIENTS, SERVERS, Work
from shared.rpc import build_server

LIMIT_S = 60.0


@pytest.mark.parametrize(("hop", "gap_s"), [*((hop, 0.0) for hop in CLIENTS), ("worker", 0.002)])
async def test_every_token_arrives_and_both_ends_tell_their_cpu_time(
    hop: str, gap_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    address, work = f"unix:{folder}/s", Work(num_steps=5, gap_s=gap_s, num_running=3)
    server = build_server(address=address)
    SERVERS[hop](work, server)
    await server.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            await CLIENTS[hop](address, work)
    finally:
        await server.stop(0)
    spent = [json.loads(line)["cpu_s"] for line in capsys.readouterr().out.splitlines()]
    assert len(spent) == 2
    assert all(seconds > 0 for seconds in spent)
