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


def ask(mesh: Mesh, *flags: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    command = Path(sys.executable).parent / "glm-mesh"
    done = subprocess.run(
        [str(command), "status", "--run-dir", str(mesh.run_dir), *flags],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout


def page(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(mesh, "--json")[1])
    return found


def test_it_shows_every_process_and_replica_and_notices_when_one_is_lost(pair: Mesh) -> None:
    pair.until_serving()
    body = {"model": "glm-nano", "prompt": "x", "max_tokens": 50, **replay("word " * 30)}
    for _ in range(2):
        httpx.post(f"{pair.url}/v1/completions", json=body, timeout=30).raise_for_status()
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
        code, table = ask(pair, "--timeout-s", "1")
        assert code == 1
        assert table.splitlines()[-1].startswith(f"not ready at {pair.url}: worker.1 away")
    finally:
        os.kill(processes["worker.1"]["pid"], signal.SIGCONT)
    os.kill(processes["worker.1"]["pid"], signal.SIGKILL)
    pair.until(lambda: not page(pair)["is_ready"], 10, "a lost replica is seen")
    pair.until(lambda: bool(page(pair)["is_ready"]), 30, "all is ready again")
    after = {row["name"]: row["instance_id"] for row in page(pair)["processes"]}
    changed = [name for name, row in processes.items() if after[name] != row["instance_id"]]
    assert changed == ["worker.1"]
