import pytest

from services.launcher.status.mesh import MeshStatus
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
