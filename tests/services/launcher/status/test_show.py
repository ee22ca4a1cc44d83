import json

from services.launcher.status.mesh import MeshStatus
from services.launcher.status.show import as_json, as_table
from tests.services.launcher.status.rows import process, replica


def cells(line: str) -> list[str]:
    return line.split()


def test_a_line_for_each_process_and_below_it_for_each_of_its_replicas() -> None:
    rows = [
        process("worker", uptime_ms=1500),
        process(replicas=[replica(), replica(1, last_step_age_ms=250)], last_step_age_ms=250),
        process("worker.1", "led", instance_id=""),
    ]
    head, worker, scheduler, first, second, led, verdict = as_table(
        MeshStatus(rows=rows, url="http://h:1")
    )
    assert cells(head)[:3] == ["NAME", "STATE", "LIVE"]
    assert cells(worker) == ["worker", "ready", "4", "1.5s", "abcdef01"]
    assert cells(scheduler) == ["scheduler", "ready", "4", "0.2s", "1.5m", "abcdef01"]
    assert cells(first) == ["replica", "0", "ready", "3", "1", "90/100", "40", "1234"]
    assert cells(second) == [*cells(first)[:1], "1", *cells(first)[2:], "0.2s"]
    assert cells(led) == ["worker.1", "led"]
    assert verdict == "ready at http://h:1"
    # Numbers stand below their names.
    assert first.index("90/100") == head.index("FREE/BLOCKS")


def test_the_last_lines_say_what_is_not_ready_and_why() -> None:
    rows = [
        process("worker", "away", reason="not reached: UNAVAILABLE"),
        process(replicas=[replica(), replica(1, "drained"), replica(2, "lost")]),
    ]
    *_, reason, verdict = as_table(MeshStatus(rows=rows))
    assert reason == "worker: not reached: UNAVAILABLE"
    assert verdict == (
        "not ready: worker away, replica 1 of scheduler drained, replica 2 of scheduler lost"
    )


def test_json_has_all_of_it() -> None:
    status = MeshStatus(rows=[process(replicas=[replica(1, "lost")])], url="http://h:1")
    page = json.loads(json.dumps(as_json(status)))
    assert (page["is_ready"], page["url"]) == (False, "http://h:1")
    (row,) = page["processes"]
    assert (row["name"], row["state"], row["is_ready"], row["num_live"]) == (
        *("scheduler", "ready"),
        *(False, 4),
    )
    assert row["instance_id"] == "abcdef0123456789"
    assert row["replicas"][0] == {
        "replica": 1,
        "state": "lost",
        "num_running": 3,
        "num_waiting": 1,
        "num_free_blocks": 90,
        "num_total_blocks": 100,
        "num_cached_blocks": 40,
        "num_steps_total": 1234,
        "last_step_age_ms": None,
    }
