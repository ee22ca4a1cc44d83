"""A rank is killed or frozen in the middle of streams: named in time, no token lost or doubled."""

import re
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.drills import BODIES, STEP_TIMEOUT_S, Group, Loss, Stream, read_all
from tests.e2e.layouts import Way

KILLED, FROZEN = signal.SIGKILL, signal.SIGSTOP
WAYS = {
    "tensor ranks": Way(tp=2, drafts=3),
    "replicas that share experts": Way(dp=2, experts="allgather", drafts=3),
    "stages": Way(pp=2, drafts=3),
    "two replicas of two ranks": Way(tp=2, dp=2, experts="allgather", drafts=3),
}
# One of each kind, and each layout.
FEW = [
    ("tensor ranks", Loss("worker.1", FROZEN)),
    ("replicas that share experts", Loss("worker.1", KILLED)),
    ("stages", Loss("worker", KILLED)),
]
# Every rank of two, one of each replica of four.
ALL = [
    (layout, Loss(rank, how))
    for layout, way in WAYS.items()
    for rank in ("worker", "worker.1" if way.num_ranks == 2 else "worker.3")
    for how in (KILLED, FROZEN)
]


def drill(layout: str, loss: Loss) -> None:
    group = Group(WAYS[layout])
    mesh = group.mesh
    try:
        whole = group.whole()
        mesh.until_idle()
        before, scheduler = group.pids(), mesh.pid("scheduler")
        streams = group.lose(loss)
        # A second for health to travel.
        mesh.until(lambda: not mesh.is_serving(), STEP_TIMEOUT_S + 1, "it does not serve")
        check_is_named(group, loss, before)
        for stream in streams:
            stream.join(110)
        assert not any(stream.error for stream in streams)
        assert [stream.token_ids for stream in streams] == whole
        assert all(stream.is_done for stream in streams)
        group.check_back(before)
        assert mesh.pid("scheduler") == scheduler, "nothing else was started again"
    finally:
        group.close()


def check_is_named(group: Group, loss: Loss, before: dict[str, int]) -> None:
    """The rank, and its last step where somebody was left to say so."""
    mesh, number = group.mesh, group.names.index(loss.rank)
    mesh.until(lambda: f"rank {number}" in mesh.screen, 20, "the lost rank is named")
    if loss.signal == KILLED:
        ended = f"{loss.rank}, rank {number} (pid {before[loss.rank]}) ended: killed by SIGKILL"
        mesh.until(lambda: ended in mesh.screen, 5, "its end is told")
    else:
        others = [name for name in group.names if name != loss.rank]
        verdicts = [line for name in others for line in mesh.log(name).splitlines()]
        assert any(f"rank {number}" in line and "step" in line for line in verdicts)
    last_steps = re.findall(r"WARNING .* lost: .*last_step=(\d+)", mesh.log("scheduler"))
    assert last_steps
    assert all(int(step) > 20 for step in last_steps), "the streams had run for twenty tokens"


@pytest.mark.parametrize(("layout", "loss"), FEW, ids=str)
def test_streams_go_on_without_a_gap_when_a_rank_is_lost(layout: str, loss: Loss) -> None:
    drill(layout, loss)


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "loss"), ALL, ids=str)
def test_streams_go_on_without_a_gap_whichever_rank_is_lost(layout: str, loss: Loss) -> None:
    drill(layout, loss)


@pytest.fixture
def impatient() -> Iterator[Group]:
    """Requests wait for their workers as briefly as they would for a single one."""
    group = Group(WAYS["tensor ranks"], {"GLM_MESH_SCHEDULER_WORKER_GRACE_S": "1.2"})
    try:
        yield group
    finally:
        group.close()


def test_with_a_short_grace_requests_end_with_an_error_that_may_be_tried_again(
    impatient: Group,
) -> None:
    mesh = impatient.mesh
    before = impatient.pids()
    streams = impatient.lose(Loss("worker.1", KILLED))
    lost_at = time.monotonic()
    for stream in streams:
        stream.join(60)
        assert stream.error["code"] == "service_unavailable"
        assert stream.is_done
        assert stream.ended_at - lost_at < 3
    refused = httpx.post(f"{mesh.url}/v1/completions", json=BODIES[0], timeout=30)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    mesh.until_serving()
    again = [Stream(mesh, body) for body in BODIES]
    read_all(again)
    assert not any(stream.error for stream in again)
    impatient.check_back(before)
