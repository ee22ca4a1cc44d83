"""What a device has and what is taken before the model: facts, and estimates marked as such.

An estimate is a number that no source states for this model; `docs/sizing.md` tells where each
comes from. All are here, so that a measurement on a device replaces them in one place.
"""

from dataclasses import dataclass
from typing import Final, Literal

MIB: Final = 1 << 20
GIB: Final = 1 << 30

HardwareName = Literal["a2", "a3", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device of a generation; on a CPU the budget is a setting and nothing is taken."""

    name: HardwareName
    title: str
    memory_bytes: int
    """What the runtime reports as the device's total."""
    devices_per_node: int

    @property
    def is_npu(self) -> bool:
        """Whether there is device memory to share out."""
        return self.name != "cpu"


# Totals as the runtime reports them in out-of-memory messages: 64 GB less what firmware keeps.
HARDWARE: Final = {
    "a2": Hardware(
        name="a2",
        title="Atlas A2 (64 GB)",
        memory_bytes=int(60.97 * GIB),
        devices_per_node=8,
    ),
    "a3": Hardware(
        name="a3",
        title="Atlas A3 (64 GB per die)",
        memory_bytes=int(61.27 * GIB),
        devices_per_node=16,
    ),
    "cpu": Hardware(name="cpu", title="CPU", memory_bytes=0, devices_per_node=1),
}

DRIVER_BYTES: Final = int(0.41 * GIB)
"""Estimate: held before a process allocates anything (60.86 of 61.27 GiB free at a start)."""

RUNTIME_BYTES: Final = GIB // 2
"""Estimate: CANN's context, streams, loaded kernels (0.13 GiB reported for a small model)."""

WORKSPACE_BYTES: Final = GIB
"""Estimate: scratch memory of the kernels and gaps in the allocator's segments."""

GRAPH_BYTES: Final = 16 * MIB
"""Estimate: one captured graph without its pool (about 3 KiB for each of 5,000 kernels)."""
