import pytest

from services.launcher.run_dir import Failing
from services.launcher.status.mesh import MeshStatus, failing_told
from tests.services.launcher.status.rows import process, replica


@pytest.mark.parametrize(
    ("state", "replicas", "is_ready"),
    [
        ("ready", [], True),
        ("led", [], True),
        ("ready", ["ready", "ready"], True),
        ("ready", ["ready", "lost"], False),
        ("ready", ["draining", "ready"], False),
        ("ready", ["drained", "ready"], False),
        ("draining", [], False),
        ("getting ready", [], False),
        ("away", [], False),
    ],
)
def test_a_mesh_is_ready_when_every_process_and_every_replica_is(
    state: str, replicas: list[str], is_ready: bool
) -> None:
    row = process(state=state, replicas=[replica(n, one) for n, one in enumerate(replicas)])
    assert row.is_ready is is_ready
    assert MeshStatus(rows=[process("worker"), row]).is_ready is is_ready


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (88.0, "keeps ending (5 times in a row), next start in 12 s"),
        (103.0, "keeps ending (5 times in a row), last start 3 s ago"),
        (161.0, ""),
    ],
)
def test_what_keeps_ending_is_told_until_it_has_stayed_a_minute(now: float, told: str) -> None:
    assert failing_told(Failing(num_failures=5, next_start_at=100.0), now) == told
    assert failing_told(None, now) == ""
