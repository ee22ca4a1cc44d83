"""`glm-mesh status` beside a running mesh."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import Mesh, replay, running


@pytest.fixture(scope="module")
def pair() -> Iterator[Mesh]:
    """Two schedulers with a replica each, two of everything in front of them."""
    yield from running(
        *("--worker", "replay", "--scheduler-count", "2"),
        *("--detokenizer-count", "2", "--api-server-count", "2"),
    )


def ask(mesh: Mesh, *flags: str, timeout_s: int = 20) -> tuple[int, str]:
    """Exit code and what was printed."""
    command = Path(sys.executable).parent / "glm-mesh"
    done = subprocess.run(
        [
            *(str(command), "status", "--run-dir", str(mesh.run_dir)),
            *("--timeout-s", str(timeout_s), *flags),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout


def page(mesh: Mesh, timeout_s: int = 20) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(mesh, "--json", timeout_s=timeout_s)[1])
    return found


def late(mesh: Mesh) -> set[str]:
    """Processes that are not ready, or whose replicas are not."""
    return {row["name"] for row in page(mesh, timeout_s=4)["processes"] if not row["is_ready"]}


def test_it_shows_every_process_and_replica_and_notices_when_one_is_lost(pair: Mesh) -> None:
    pair.until_serving()
    body = {"model": "glm-nano", "prompt": "x", "max_tokens": 50, **replay("word " * 30)}
    for _ in range(2):
        httpx.post(f"{pair.url}/v1/completions", json=body, timeout=30).raise_for_status()
    pair.until_idle()
    code, table = ask(pair)
    assert code == 0, table
    names = [line.split()[0] for line in table.splitlines()[1:-1]]
    assert sorted(names) == [
        *("detokenizer", "detokenizer-1", "frontend", "frontend-1", "replica", "replica"),
        *("scheduler", "scheduler-1", "worker", "worker.1"),
    ]
    before = page(pair)
    processes = {row["name"]: row for row in before["processes"]}
    assert {name: row["pid"] for name, row in processes.items()} == {
        name: entry["pid"] for name, entry in pair.state()["services"].items()
    }
    replicas = [*processes["scheduler"]["replicas"], *processes["scheduler-1"]["replicas"]]
    assert sum(row["num_steps_total"] for row in replicas) > 30
    assert all(row["num_free_blocks"] == row["num_total_blocks"] > 0 for row in replicas)

    os.kill(processes["worker.1"]["pid"], signal.SIGSTOP)  # it cannot answer, and is not restarted
    try:
        code, table = ask(pair, timeout_s=4)  # for the others, on a busy machine
        assert code == 1
        assert table.splitlines()[-1].startswith(f"not ready at {pair.url}: worker.1 away")
    finally:
        os.kill(processes["worker.1"]["pid"], signal.SIGCONT)
    os.kill(pair.process.pid, signal.SIGSTOP)  # else it may be started again before one looks
    try:
        os.kill(processes["worker.1"]["pid"], signal.SIGKILL)
        pair.until(lambda: late(pair) == {"scheduler-1", "worker.1"}, 30, "a lost replica is seen")
    finally:
        os.kill(pair.process.pid, signal.SIGCONT)
    pair.until(lambda: not late(pair), 60, "all is ready again")
    after = {row["name"]: row["instance_id"] for row in page(pair)["processes"]}
    changed = [name for name, row in processes.items() if after[name] != row["instance_id"]]
    assert changed == ["worker.1"]
