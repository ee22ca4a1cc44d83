"""HCCL communicators of a rank and the device memory of their buffers.

A communicator takes twice its buffer, to send and to receive. Groups with the same members and
options share one; the exchange of experts' tokens has its own, whose buffer is its window. A group
that no step uses has no communicator: it is made at its first use.
"""

from dataclasses import dataclass

from services.worker.parallel.hccl import DP_HCCL_MIB
from services.worker.parallel.moe_method import MoeMethod
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import MIB
from services.worker.sizing.moe_traffic import moe_methods


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One communicator of a rank."""

    names: tuple[str, ...]
    """Groups that share it."""
    size: int
    """Ranks."""
    buffer_mib: int

    @property
    def num_bytes(self) -> int:
        """Device memory of its buffers."""
        return 2 * self.buffer_mib * MIB


def communicators(deployment: Deployment, rank: int) -> tuple[Communicator, ...]:
    """The communicators of one rank, in the order in which their groups are created."""
    methods = moe_methods(deployment)
    is_joint = deployment.topology.expert_parallel_size > 1
    used = {
        "tp": True,
        "dcp": True,
        "pp": True,
        "dp": is_joint,
        "ep": is_joint and bool(methods - {MoeMethod.MC2}),
        "mc2": MoeMethod.MC2 in methods,
    }
    made: dict[tuple[tuple[int, ...], int, bool], list[str]] = {}
    for group in deployment.topology.groups():
        if rank not in group.members or len(group.members) == 1 or not used.get(group.name):
            continue
        buffer = DP_HCCL_MIB if group.name == "dp" else deployment.hccl_mib
        made.setdefault((group.members, buffer, group.name == "mc2"), []).append(group.name)
    return tuple(
        Communicator(names=tuple(names), size=len(members), buffer_mib=buffer)
        for (members, buffer, _), names in made.items()
    )
