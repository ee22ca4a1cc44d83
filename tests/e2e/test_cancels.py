"""Clients that leave at random moments, in every way there is, leave nothing behind."""

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from tests.e2e.cancels import Crowd, Holdings, look
from tests.e2e.mesh import Mesh, running

# Few sequences at once and few blocks: clients leave while they wait, too, and after they had to.
FLAGS = (
    *("--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "8"),
    *("--max-model-len", "1024", "--kv-cache-memory-bytes", "64M"),
    *("--speculative-config", '{"num_speculative_tokens": 2, "method": "mtp"}'),
)
# A health check or a connection that is just being closed.
SLACK = 4


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """For nobody else."""
    yield from running(*FLAGS)


@pytest.fixture(params=[("-tp", "2"), ("-dp", "2", "-ep")], ids=" ".join)
def group(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """Whose ranks all have to hear of who left."""
    yield from running(*FLAGS, *request.param)


def check_nothing_is_left(before: Holdings, after: Holdings) -> None:
    assert set(after.live.values()) == {0}, after
    for name in before.tasks:
        assert after.tasks[name] <= before.tasks[name] + SLACK, (before, after)
        assert after.files[name] <= before.files[name] + SLACK, (before, after)


def is_like(after: Holdings, before: Holdings) -> bool:
    return is_at_most(after.tasks, before.tasks) and is_at_most(after.files, before.files)


def is_at_most(found: Mapping[str, int], allowed: Mapping[str, int]) -> bool:
    return all(found[name] <= number for name, number in allowed.items())


async def cancel(mesh: Mesh, count: int, seed: int) -> tuple[Holdings, Holdings]:
    """What is held before and after."""
    await Crowd(mesh, seed).run(20)  # what is made on first use is there now
    mesh.until_idle()
    before = await look(mesh)
    crowd = Crowd(mesh, seed + 1)
    await crowd.run(count)
    assert crowd.texts == {"tree house"}, "those who stay are served all the time"
    assert len(crowd.ways) == 8
    mesh.until_idle()

    after = await look(mesh)
    for _ in range(50):
        if not any(after.live.values()) and is_like(after, before):
            break
        await asyncio.sleep(0.1)
        after = await look(mesh)
    print(f"{count} cancels: {crowd.ways}\nbefore {before}\nafter {after}")
    return before, after


async def test_five_hundred_cancels_leave_nothing_behind(mesh: Mesh) -> None:
    check_nothing_is_left(*await cancel(mesh, 500, seed=1))


@pytest.mark.soak
async def test_a_thousand_cancels_leave_nothing_behind_in_a_group_of_ranks(group: Mesh) -> None:
    check_nothing_is_left(*await cancel(group, 1_000, seed=4))


@pytest.mark.soak
async def test_ten_thousand_cancels_leave_nothing_behind(mesh: Mesh) -> None:
    first, middle = await cancel(mesh, 5_000, seed=2)
    check_nothing_is_left(first, middle)
    _, last = await cancel(mesh, 5_000, seed=3)
    check_nothing_is_left(first, last)
    for name, memory_mib in last.memory_mib.items():
        # Two kilobytes of each cancel. Of twenty thousand the worker grew by 3 MiB, and no more
        # in the last ten thousand: blocks and steps of sizes that it had not seen before.
        assert memory_mib - middle.memory_mib[name] < 10, (middle, last)
