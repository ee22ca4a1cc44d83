"""What a device does per second: published peaks, and the shares of them that are assumed.

Nothing here was measured by us; each number says where it is from. The shares are estimates for
well-filled kernels. `calibrate.py` shows how to replace all of it by a measured run.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peaks of one device (A2: a 910B; A3: one of the two dies of a 910C)."""

    name: str
    bf16_flops: float
    int8_ops: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    """To the other devices of a replica, each direction."""


DEVICES: Final = {
    "a2": Device(
        name="a2",
        # 280 and 560 T: specification of the 910B at ai.gitee.com/docs/compute/clusters_gpu.
        bf16_flops=280e12,
        int8_ops=560e12,
        # Half of a 910C, which is two such dies with 3.2 TB/s.
        memory_bytes_per_s=1.6e12,
        # As the runtime reports it (services/worker/sizing/hardware.py).
        memory_bytes=60.97 * 2**30,
        # Seven links of 28 GB/s each direction to the other devices of a node (HCCS).
        link_bytes_per_s=196e9,
    ),
    "a3": Device(
        name="a3",
        # Half of a 910C: 780 TFLOPS, 3,200 GB/s (techpowerup.com/335749), 784 GB/s of links.
        bf16_flops=390e12,
        int8_ops=780e12,
        memory_bytes_per_s=1.6e12,
        memory_bytes=61.27 * 2**30,
        link_bytes_per_s=196e9,
    ),
}

COMPUTE_SHARE: Final = 0.5
"""Estimate: of the peak, in large matrix products."""

MEMORY_SHARE: Final = 0.6
"""Estimate: of the peak, while weights and caches are read."""

LINK_SHARE: Final = 0.6
"""Estimate: of the peak, in exchanges of some hundred kilobytes."""

EXCHANGE_S: Final = 12e-6
"""Estimate: what an exchange between the devices of a node takes whatever its size."""

STEP_S: Final = 2e-3
"""Estimate: what a step takes beside its layers (inputs, sampling, reading back, one replay)."""

KERNEL_S: Final = 25e-6
"""Estimate: gaps between the kernels of one layer in a replayed graph (about ten of them)."""

EAGER_LAYER_S: Final = 120e-6
"""Estimate: what the host takes to launch the kernels of one layer in a step that is no graph (some
fifteen of them, 8 us each); a step of prompts is not shorter than that, however few its tokens."""

MESSAGE_S: Final = 230e-6
"""A message between two processes, one way, 10 ms after the last one, so that threads have to wake:
measured (`messages.py`) on two cores of a shared x86 machine, 217 to 245 us; without a pause 75 us.
Between machines it is an estimate."""

MESSAGE_CPU_S: Final = 45e-6
"""What sending or receiving a message takes of a process, conversion not counted: measured by the
same, one after the other, as a busy scheduler has them; with pauses 120 to 150 us."""

TICK_S: Final = 0.1
"""The scheduler looks at deadlines so often (`services/scheduler/engine.py`)."""

RESERVED_BYTES: Final = 5 * 2**30
"""Estimate: runtime, workspace, communicators, graphs; see docs/sizing.md."""
