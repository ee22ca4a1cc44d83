"""Which worker processes a deployment has, and which of them fail together.

A rank is a process. Ranks are numbered as the worker's own topology numbers them: replicas first,
then stages, then ranks of a layer. The first rank of a replica leads it: it alone serves. Ranks
that exchange tensors are one world, and a world is started and ended as a whole: replicas are
worlds of their own unless they share experts.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import ConfigError

# Ranks of a CPU wait for each other much of the time, but every one needs its share of a core.
MAX_RANKS_PER_CORE: Final = 2
# So that small layouts can be tried anywhere.
MIN_MAX_RANKS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRank:
    """One worker process."""

    name: str
    """Of its log and sockets: `worker`, `worker.1`, ..."""
    world: int
    """The world that it belongs to."""
    number: int
    """Its place in the world."""
    replica: int
    """Of its scheduler."""
    place: int
    """Its place in the replica; the first one leads."""
    scheduler: int = 0
    """The scheduler that drives it."""

    @property
    def is_leader(self) -> bool:
        """Whether it answers for its replica."""
        return self.place == 0

    @property
    def told(self) -> str:
        """The rank in words."""
        return f"rank {self.number}" + (f" of world {self.world}" if self.world else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    layer_partition: tuple[int, ...] = ()
    """Layers of each stage; empty: as even as possible."""
    enable_dsa_cp: bool = False
    enable_flashcomm1: bool = False
    num_schedulers: int = 1
    """Each drives all of the above, for itself."""

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def num_ranks(self) -> int:
        """Worker processes of one scheduler."""
        return self.data_parallel_size * self.replica_size

    @property
    def num_processes(self) -> int:
        """Worker processes of all."""
        return self.num_schedulers * self.num_ranks

    @property
    def is_joint(self) -> bool:
        """Whether replicas share experts, and so one world."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def world_size(self) -> int:
        """Ranks that meet at all."""
        return self.num_ranks if self.is_joint else self.replica_size

    def ranks(self) -> Iterator[WorkerRank]:
        """All worker processes, leaders before those that they lead."""
        for process in range(self.num_processes):
            world, number = divmod(process, self.world_size)
            scheduler, own = divmod(process, self.num_ranks)
            yield WorkerRank(
                name=f"worker.{process}" if process else "worker",
                world=world,
                number=number,
                replica=own // self.replica_size,
                place=own % self.replica_size,
                scheduler=scheduler,
            )


def check_fit(layout: Layout, *, device: str, visible_devices: str | None, num_cores: int) -> None:
    """Refuse more ranks than this machine can run.

    Args:
        layout: What is asked for.
        device: `cpu` or `npu`.
        visible_devices: ASCEND_RT_VISIBLE_DEVICES, where it is set.
        num_cores: Cores that this process may use.

    Raises:
        ConfigError: Naming the sizes and the bound.
    """
    many = f"--scheduler-count {layout.num_schedulers} x " if layout.num_schedulers > 1 else ""
    sizes = (
        f"{many}--tensor-parallel-size {layout.tensor_parallel_size} x --pipeline-parallel-size "
        f"{layout.pipeline_parallel_size} x --data-parallel-size {layout.data_parallel_size}"
    )
    if device == "cpu":
        most = max(MIN_MAX_RANKS, MAX_RANKS_PER_CORE * num_cores)
        if layout.num_processes > most:
            raise ConfigError(
                f"{sizes}: {layout.num_processes} ranks are more than {most}, the most for the "
                f"{num_cores} cores of this machine"
            )
    elif visible_devices is not None:
        devices = [part for part in visible_devices.split(",") if part.strip()]
        if layout.num_processes > len(devices):
            raise ConfigError(
                f"{sizes}: {layout.num_processes} ranks are more than the {len(devices)} devices "
                f"of ASCEND_RT_VISIBLE_DEVICES={visible_devices}"
            )


def threads_per_rank(layout: Layout, num_cores: int) -> int:
    """Threads of one operator, so that ranks do not push each other off the cores."""
    return max(1, num_cores // layout.num_processes)


def rank_flags(layout: Layout, rank: WorkerRank, rendezvous: Path) -> list[object]:
    """What tells a worker process which rank it is; nothing where it meets no other.

    Args:
        layout: Of the deployment.
        rank: The process.
        rendezvous: Where the ranks of its world meet.
    """
    if layout.world_size == 1:
        return []
    flags: list[object] = [
        *("--tensor-parallel-size", layout.tensor_parallel_size),
        *("--pipeline-parallel-size", layout.pipeline_parallel_size),
        *("--rank", rank.place),
        *("--rendezvous", f"file://{rendezvous}"),
    ]
    if layout.layer_partition:
        flags += ["--pp-layer-partition", ",".join(map(str, layout.layer_partition))]
    if layout.enable_expert_parallel:
        flags.append("--enable-expert-parallel")
    if layout.tensor_parallel_size > 1:  # one rank has no tokens to cut
        flags += ["--enable-dsa-cp"] * layout.enable_dsa_cp
        flags += ["--enable-flashcomm1"] * layout.enable_flashcomm1
    if layout.is_joint:
        flags += ["--data-parallel-size", layout.data_parallel_size]
        flags += ["--data-parallel-rank", rank.replica]
    return flags


def own_devices(layout: Layout, rank: WorkerRank, visible_devices: str | None) -> str | None:
    """ASCEND_RT_VISIBLE_DEVICES of a rank; None where its number in its world picks the device.

    Worlds of one machine number their ranks from 0 each, so each sees its own devices only.
    """
    if layout.num_processes == layout.world_size:
        return visible_devices
    devices = [str(number) for number in range(layout.num_processes)]
    if visible_devices is not None:
        devices = [part.strip() for part in visible_devices.split(",") if part.strip()]
    first = rank.world * layout.world_size
    return ",".join(devices[first : first + layout.world_size])


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
