"""One of two worker groups is killed or frozen under load: its streams go on at the other one.

The groups know nothing of each other (no shared experts), so the mesh serves all the while. Every
token is compared with a run in which nothing happened: none is lost, doubled or another one.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.drills import Group, Loss, Stream, read_all
from tests.e2e.layouts import Way

NUM_TOKENS = 40
# So that a frozen group is found soon, and far above a step of two busy cores.
FREEZE_TIMEOUT_S = 4.0
# Two starts that are shared: what a lost group held of them is gone with it.
STARTS = ("one two three four five six seven " * 20, "ten nine eight seven " * 3)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0, "frequency_penalty": 0.5},
    # More words than tokens: the grammar's state has to be found again in the midst of it.
    {
        "temperature": 0.8,
        "presence_penalty": 0.3,
        "structured_outputs": {"regex": "([a-z]{2,9} ){60}"},
    },
)
SIXTEEN: list[dict[str, Any]] = [
    {
        "model": "glm-nano",
        "prompt": f"{STARTS[number % 2]}{number} one",
        "seed": number,
        "ignore_eos": True,
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
        **KINDS[number // 2 % 4],
    }
    for number in range(16)
]


@contextmanager
def running(way: Way, **environment: str) -> Iterator[Group]:
    group = Group(way, environment)
    try:
        yield group
    finally:
        group.close()


def streams_of(group: Group, bodies: list[dict[str, Any]]) -> list[Stream]:
    return [Stream(group.mesh, body) for body in bodies]


def undisturbed(group: Group) -> list[list[int]]:
    streams = streams_of(group, SIXTEEN)
    read_all(streams)
    assert not any(stream.error for stream in streams)
    assert [len(stream.token_ids) for stream in streams] == [NUM_TOKENS] * len(SIXTEEN)
    return [stream.token_ids for stream in streams]


def steps(group: Group) -> list[float]:
    """Of each replica."""
    return group.mesh.values("glm_mesh:replica_steps_total")


def lose(group: Group, loss: Loss) -> list[Stream]:
    """Sixteen streams, and a group that is lost while all of them run."""
    pid = group.mesh.pid(loss.rank)
    first = Stream(group.mesh, SIXTEEN[0], 8, lambda: os.kill(pid, loss.signal))
    streams = [first, *streams_of(group, SIXTEEN[1:])]
    for stream in reversed(streams):
        stream.start()
    for stream in streams:
        stream.join(110)
        assert group.mesh.is_serving(), "the other group serves all the while"
    assert first.done_at, "it ended before a group was lost"
    return streams


def check_both_serve(group: Group, whole: list[list[int]]) -> None:
    """The group that is back gets work again, and says the same with new caches.

    How much depends on whose streams come first: shared starts draw the others of their kind.
    """
    mesh = group.mesh
    mesh.until_idle()
    before = steps(group)
    assert undisturbed(group) == whole
    assert all(now > then for now, then in zip(steps(group), before, strict=True))
    mesh.until_idle()


def drill(group: Group, loss: Loss, *, num_ranks: int = 1) -> None:
    """Lose a group of so many ranks, see its streams go on, and the group come back."""
    mesh, whole = group.mesh, undisturbed(group)
    before, scheduler = group.pids(), mesh.pid("scheduler")
    streams = lose(group, loss)
    assert not any(stream.error for stream in streams)
    assert [stream.token_ids for stream in streams] == whole
    assert all(stream.is_done for stream in streams)
    lost = group.names.index(loss.rank) // num_ranks
    is_frozen = loss.signal == signal.SIGSTOP
    if is_frozen:
        assert group.pids() == before, "frozen, not dead: nobody restarted it"
        os.kill(before[loss.rank], signal.SIGCONT)

    def is_back() -> bool:
        told = mesh.log("scheduler").rpartition(f"worker of replica {lost} lost: ")
        return bool(told[1]) and f"replicas=[{lost}]" in told[2]

    mesh.until(is_back, 60, "the group takes plans again")
    check_both_serve(group, whole)
    after = group.pids()
    gone = group.names[lost * num_ranks : (lost + 1) * num_ranks]
    renewed = [name for name in before if after[name] != before[name]]
    assert renewed == ([] if is_frozen else gone)
    assert mesh.pid("scheduler") == scheduler


ALONE = Way(dp=2, drafts=3, graphs="recorded")
KILLED, FROZEN = signal.SIGKILL, signal.SIGSTOP


def test_sixteen_streams_lose_no_token_with_a_group() -> None:
    with running(ALONE) as group:
        drill(group, Loss("worker.1", KILLED))


@pytest.mark.soak
@pytest.mark.parametrize(
    "loss", [Loss("worker", KILLED), Loss("worker", FROZEN), Loss("worker.1", FROZEN)], ids=str
)
def test_sixteen_streams_lose_no_token_whichever_group_is_lost_in_which_way(loss: Loss) -> None:
    with running(ALONE, GLM_MESH_SCHEDULER_STEP_TIMEOUT_S=str(FREEZE_TIMEOUT_S)) as group:
        drill(group, loss)


@pytest.mark.soak
def test_a_group_that_is_frozen_while_idle_holds_no_constrained_request_up() -> None:
    bodies = [body for body in SIXTEEN if "structured_outputs" in body]
    with running(ALONE, GLM_MESH_SCHEDULER_STEP_TIMEOUT_S=str(FREEZE_TIMEOUT_S)) as group:
        whole = undisturbed(group)
        group.mesh.until_idle()
        pid = group.mesh.pid("worker.1")
        os.kill(pid, FROZEN)
        try:
            # A grammar that nobody has seen yet. The group would be missed after 25 s.
            new = [body | {"structured_outputs": {"regex": "([a-z]{2,8} ){60}"}} for body in bodies]
            started = time.monotonic()
            fresh = streams_of(group, new)
            read_all(fresh)
            assert time.monotonic() - started < 20
            assert not any(stream.error for stream in fresh)
            assert all(stream.is_done for stream in fresh)
        finally:
            os.kill(pid, signal.SIGCONT)
        group.mesh.until_serving()
        assert undisturbed(group) == whole


@pytest.mark.soak
def test_a_group_of_two_ranks_goes_as_a_whole_and_the_other_group_takes_its_streams() -> None:
    with running(Way(tp=2, dp=2, drafts=3)) as group:
        drill(group, Loss("worker.3", KILLED), num_ranks=2)
        assert "worker.3, rank 1 of world 1" in group.mesh.screen


def kill_both(group: Group) -> list[Stream]:
    pids = [group.mesh.pid(name) for name in group.names]
    others = streams_of(group, SIXTEEN[1:])

    def kill() -> None:
        for pid in pids:
            os.kill(pid, KILLED)

    first = Stream(group.mesh, SIXTEEN[0], 8, kill, others)
    streams = [first, *others]
    read_all(streams[::-1])
    assert first.done_at, "it ended before the groups were lost"
    return streams


@pytest.mark.soak
def test_without_any_group_streams_wait_for_one_that_is_back_in_time() -> None:
    with running(ALONE, GLM_MESH_SCHEDULER_WORKER_GRACE_S="60") as group:
        whole = undisturbed(group)
        streams = kill_both(group)
        assert not any(stream.error for stream in streams)
        assert [stream.token_ids for stream in streams] == whole
        group.mesh.until_serving()
        check_both_serve(group, whole)


@pytest.mark.soak
def test_without_any_group_for_longer_than_the_grace_streams_end_with_one_error() -> None:
    with running(ALONE, GLM_MESH_SCHEDULER_WORKER_GRACE_S="0.2") as group:
        whole = undisturbed(group)
        streams = kill_both(group)
        for stream, tokens in zip(streams, whole, strict=True):
            if stream.error:
                assert stream.error["code"] == "service_unavailable"
                assert stream.ended_at - streams[0].done_at < 3
            assert stream.is_done
            # What came before the error is a start of the whole: nothing doubled, nothing else.
            assert stream.token_ids == tokens[: len(stream.token_ids)]
        assert any(stream.error for stream in streams)
        group.mesh.until_serving()
        group.mesh.until_idle()
        assert undisturbed(group) == whole
