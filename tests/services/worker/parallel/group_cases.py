"""What each rank does in tests of exchanges."""

import os
from pathlib import Path
from typing import Any

import torch

from services.worker.parallel.topology import Topology
from services.worker.parallel.world import Membership, World

CPU = torch.device("cpu")


def join(rank: int, rendezvous: str, topology: str, **changes: Any) -> World:
    values = {"device": CPU, "timeout_s": 20.0}
    return World.join(
        Membership(
            topology=Topology.parse(topology),
            number=rank,
            rendezvous=rendezvous,
            **(values | changes),
        )
    )


def values_of(rank: int, dtype: str, count: int = 1000) -> torch.Tensor:
    """Numbers whose sum depends on the order of adding them."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-6, 6, (count,), generator=generator)
    values = torch.randn(count, generator=generator) * 2.0**exponents
    return values.to(getattr(torch, dtype))


def every_exchange(rank: int, rendezvous: str, topology: str, dtype: str) -> dict[str, Any]:
    world = join(rank, rendezvous, topology)
    group = world.groups.tp
    size = group.size
    sent = [1 + (rank + other) % 3 for other in range(size)]
    received = [1 + (rank + other) % 3 for other in range(size)]
    rows = torch.full((sum(sent), 2), rank).to(getattr(torch, dtype))
    x = values_of(rank, dtype)
    ramp = torch.arange(6).view(2, 3) + 10 * rank
    found = {
        "sum": group.all_reduce(x.clone()),
        "rows": group.all_gather(ramp),
        "columns": group.all_gather(ramp, dim=1),
        "part": group.reduce_scatter(torch.arange(2 * size)[:, None] + rank),
        "moved": group.all_to_all(rows, received, sent),
        "counts": group.gather_counts(torch.tensor([rank, 7])),
        "told": group.broadcast(torch.full((2,), rank), size - 1),
        "fused": group.fused("something", lambda: rank),
    }
    # A ring: the first rank sends first.
    own, other = torch.full((3,), rank), torch.empty(3, dtype=torch.int64)
    if rank == 0:
        group.send(own, 1)
        found["ring"] = group.receive(other, size - 1)
    else:
        found["ring"] = group.receive(other, rank - 1)
        group.send(own, (rank + 1) % size)
    found["num_meetings"] = world.progress.position().num_meetings
    found["meeting"] = world.progress.position().meeting
    world.leave()
    return found


def build_groups(rank: int, rendezvous: str, topology: str) -> dict[str, list[int]]:
    """Members of each of this rank's groups, by asking them."""
    world = join(rank, rendezvous, topology)
    names = ("tp", "pp", "dp", "ep", "mc2", "replica", "orders")
    found = {}
    for name in names:
        group = getattr(world.groups, name)
        assert group.name == name
        found[name] = group.all_gather(torch.tensor([rank])).tolist()
    # Where the members are the same one communicator serves several groups, but not all.
    found["num_made"] = [len(set(map(id, world._made.values())))]
    world.leave()
    return found


def listening_addresses(rank: int, rendezvous: str) -> list[str]:
    """Where this process listens while a world stands, as /proc writes it."""
    world = join(rank, rendezvous, "tp2")
    world.groups.tp.all_reduce(torch.ones(1))
    held = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
            found.append(fields[1].partition(":")[0])
    world.leave()
    return found


def wait_too_long(rank: int, rendezvous: str) -> str:
    """The others' complaint about the last rank, which does not join an exchange.

    The limit holds for the building of the groups too, for which a busy machine needs a while.
    """
    world = join(rank, rendezvous, "tp2", timeout_s=4.0)
    complaint = ""
    if rank == 0:
        try:
            world.groups.tp.all_reduce(torch.ones(3))
        except RuntimeError as error:
            complaint = str(error)
        assert world.progress.position().meeting == "tp.all_reduce"
    world.gather("after", "", timeout_s=20)
    world.leave()
    return complaint
