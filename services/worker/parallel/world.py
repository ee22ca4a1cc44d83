"""Brings the ranks of a world together and builds their groups.

Creating a group is a call of the whole world: every rank creates every group, its own or not, in
the order of `Topology.groups`. On an NPU groups exchange device tensors by HCCL, and those of a
replica's ranks host tensors by Gloo; on a CPU all is Gloo.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    PrefixStore,
    ProcessGroup,
    Store,
)

from services.worker.parallel.groups import Group, Groups, OneRank, RankGroup
from services.worker.parallel.hccl import DEFAULT_HCCL_MIB, DP_HCCL_MIB
from services.worker.parallel.progress import Progress
from services.worker.parallel.rendezvous import gather, open_store
from services.worker.parallel.topology import Rank, Topology
from shared.errors import ConfigError

_ON_HOST: Final = frozenset({"replica", "orders"})
"""Groups that exchange host tensors, whatever the device."""
_OWN_DOMAIN: Final = frozenset({"mc2", "replica", "orders"})
"""Groups that share no communicator: fused operators want theirs to themselves."""
_LOOPBACK: Final = Path("/sys/class/net/lo")
_NO_TIMEOUT: Final = timedelta(days=365)
"""Orders come when there is work; that the leader is gone is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One rank's place in a world, and how it gets there."""

    topology: Topology
    number: int
    """The rank in its world; a replica that shares nothing is a world."""
    device: torch.device
    rendezvous: str
    timeout_s: float
    """How long a rank may wait in an exchange."""
    join_timeout_s: float = 300.0
    """How long the world may take to come together."""
    hccl_mib: int = DEFAULT_HCCL_MIB

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.topology.joint_size:
            raise ConfigError(
                f"--rank: {self.number} is not below the {self.topology.joint_size} ranks of "
                f"{self.topology}"
            )

    @property
    def rank(self) -> Rank:
        """Its coordinates."""
        return self.topology.coordinates(self.number)


class World:
    """The groups of this process; at most one stands at a time."""

    def __init__(self, membership: Membership, store: Store, progress: Progress) -> None:
        self.membership = membership
        self.progress = progress
        self.store = store
        self._made: dict[tuple[object, ...], ProcessGroup] = {}
        self.groups = Groups()

    @classmethod
    def meet(cls, membership: Membership, is_stopping: Callable[[], bool] = lambda: False) -> World:
        """Wait until all ranks are there.

        Raises:
            ConfigError: The address cannot be used.
            JoinError: Ranks are missing.
        """
        number, size = membership.number, membership.topology.joint_size
        limit_s = membership.join_timeout_s
        store = open_store(membership.rendezvous, rank=number, size=size, timeout_s=limit_s)
        world = cls(membership, store, Progress())
        world.gather("here", "", timeout_s=limit_s, is_stopping=is_stopping)
        return world

    @classmethod
    def join(cls, membership: Membership) -> World:
        """Wait until all ranks are there, and build the groups."""
        world = cls.meet(membership)
        world.build_groups()
        return world

    def gather(
        self,
        topic: str,
        text: str,
        *,
        timeout_s: float,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """Every rank's text in order; for what is agreed on once.

        Raises:
            JoinError: Some rank did not tell its own in time, or this one is to stop.
        """
        return gather(
            self.store,
            topic,
            text,
            rank=self.membership.number,
            size=self.membership.topology.joint_size,
            timeout_s=timeout_s,
            is_stopping=is_stopping,
        )

    def build_groups(self) -> None:
        """Build every group, as all other ranks do."""
        membership = self.membership
        if membership.rendezvous.startswith("file:") and _LOOPBACK.exists():
            # Ranks that share a file are on one machine: no need to listen to others.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
        distributed.init_process_group(
            "gloo" if membership.device.type == "cpu" else "hccl",
            store=PrefixStore("torch", self.store),
            rank=membership.number,
            world_size=membership.topology.joint_size,
            timeout=timedelta(seconds=membership.timeout_s),
        )
        self.groups = self._build()

    def leave(self) -> None:
        """Give up all groups. Every rank calls it, none is in an exchange."""
        self._made.clear()
        self.groups = Groups()
        distributed.destroy_process_group()

    def _build(self) -> Groups:
        own: dict[str, Group] = {}
        for group in self.membership.topology.groups():
            if group.name == "world" or len(group.members) == 1:
                continue
            made = self._make(group.name, group.members)
            if self.membership.number in group.members:
                own[group.name] = RankGroup(group.name, made, self.progress, self._handle(made))
        names = ("tp", "pp", "dp", "ep", "mc2", "replica", "orders")
        return Groups(**{name: own.get(name) or OneRank(name) for name in names})

    def _make(self, name: str, members: tuple[int, ...]) -> ProcessGroup:
        """A process group, shared by groups of the same ranks that may share one."""
        buffer_mib = DP_HCCL_MIB if name == "dp" else self.membership.hccl_mib
        domain = name if name in _OWN_DOMAIN else ""
        key = (members, buffer_mib, domain)
        if key not in self._made:
            timeout = timedelta(seconds=self.membership.timeout_s)
            is_hccl = self.membership.device.type != "cpu" and name not in _ON_HOST
            # A window for fused operators is sized by the environment, as their page says.
            options = hccl_options(name, None if name == "mc2" else buffer_mib) if is_hccl else None
            made = distributed.new_group(
                list(members),
                timeout=_NO_TIMEOUT if name == "orders" else timeout,
                backend="hccl" if is_hccl else "gloo",
                pg_options=options,
            )
            self._made[key] = made
        return self._made[key]

    def _handle(self, group: ProcessGroup) -> str:
        """How operators that communicate by themselves know a group."""
        if self.membership.device.type == "cpu":
            return str(group.group_name)
        return hccl_name(group)


def hccl_options(name: str, buffer_mib: int | None) -> Any:  # noqa: ANN401  torch_npu's own type
    """Options of a communicator: its name in profiles, and the MiB of its buffer each way."""
    torch_npu = importlib.import_module("torch_npu")
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    config: dict[str, int | str] = {"group_name": name}
    if buffer_mib is not None:
        config["hccl_buffer_size"] = buffer_mib
    options.hccl_config = config
    return options


def hccl_name(group: ProcessGroup) -> str:
    """The communicator's name, which the fused operators take."""
    backend = group._get_backend(torch.device("npu"))
    return str(backend.get_hccl_comm_name(group.rank()))  # type: ignore[attr-defined]  # HCCL's
