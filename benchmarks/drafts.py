"""What drafts bring: tokens per second of glm-nano through the mesh, by number of drafts.

    python -m benchmarks.drafts [--concurrency 1 16] [--drafts 0 1 2 3 5]

Questions of every skill that the checkpoint has learned, answered greedily over HTTP. One line per
number of drafts and concurrency, with the rate over that of no drafts, and the share of drafts kept
at each place.
"""

import argparse
import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Sequence

import httpx

from benchmarks.mesh import running_mesh
from tools.nano.evaluate import request_body
from tools.nano.tasks import SKILLS, Task, make_task

# The design asks for it at concurrency 1, with the best number of drafts.
AIM = 1.3
TIMEOUT_S = 120.0
_PREFIX = "vllm:spec_decode_num_"


def main(argv: list[str] | None = None) -> int:
    """Measure each number of drafts in a mesh of its own."""
    parser = argparse.ArgumentParser(description="tokens per second by number of drafts")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--drafts", type=int, nargs="*", default=[0, 1, 2, 3, 5])
    parser.add_argument("--prompts", type=int, default=10, help="questions of each skill")
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts")
    parser.add_argument("--flag", action="append", default=[], help="one more flag for `up`")
    args = parser.parse_args(argv)
    tasks = [make_task(skill, seed) for seed in range(args.prompts) for skill in SKILLS]
    plain: dict[int, float] = {}
    for num_drafts in sorted({0, *args.drafts}):
        with running_mesh(*_flags(num_drafts), *args.flag) as mesh:
            asyncio.run(_answer(mesh.port, tasks[: len(SKILLS)], 4))  # warm up
            for concurrency in args.concurrency:
                rate = max(
                    asyncio.run(_answer(mesh.port, tasks, concurrency)) for _ in range(args.rounds)
                )
                plain.setdefault(concurrency, rate)
                line = {
                    "claim": "drafts",
                    "num_drafts": num_drafts,
                    "concurrency": concurrency,
                    "tokens_per_s": round(rate, 1),
                    "ratio": round(rate / plain[concurrency], 2),
                    "aim": AIM if concurrency == 1 else None,
                    **_accepted(mesh.port, num_drafts),
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    return 0


def _flags(num_drafts: int) -> list[str]:
    if not num_drafts:
        return []
    config = {"method": "deepseek_mtp", "num_speculative_tokens": num_drafts}
    return ["--speculative-config", json.dumps(config)]


async def _answer(port: int, tasks: Sequence[Task], concurrency: int) -> float:
    """Ask everything; generated tokens per second."""
    gate = asyncio.Semaphore(concurrency)
    url = f"http://127.0.0.1:{port}/v1/"

    async def ask(client: httpx.AsyncClient, task: Task) -> int:
        async with gate:
            answer = await client.post("chat/completions", json=request_body(task, "glm-nano"))
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        began = time.perf_counter()
        counts = await asyncio.gather(*(ask(client, task) for task in tasks))
        return sum(counts) / (time.perf_counter() - began)


def _accepted(port: int, num_drafts: int) -> dict[str, object]:
    """Drafts kept per step that had some, and the share of steps that kept each place."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    series = {
        name.removeprefix(_PREFIX): float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith(_PREFIX))
    }
    steps = series["drafts_total"]
    if not steps:
        return {"mean_accepted": 0.0, "kept_by_position": []}
    kept = [
        series[f'accepted_tokens_per_pos_total{{position="{place}"}}']
        for place in range(num_drafts)
    ]
    return {
        "mean_accepted": round(sum(kept) / steps, 2),
        "kept_by_position": [round(count / steps, 3) for count in kept],
    }


if __name__ == "__main__":
    sys.exit(main())
