"""Whether the weights of a model fit into free memory, told before any of it is taken.

An allocator would fail in the middle of loading, or the system would end the process without a
word: memory is promised before it is there.
"""

from dataclasses import replace

import torch

from services.worker.capacity import free_host_bytes
from services.worker.model.spec import ModelSpec
from services.worker.parallel.groups import Groups
from services.worker.sizing.weights import weigh_rank
from shared.errors import ConfigError

_GIB = 1 << 30


def check_room(spec: ModelSpec) -> None:
    """Compare the weights of this rank with what its device has free.

    Raises:
        ConfigError: They do not fit.
    """
    free = _free_bytes(spec.device)
    if free is None:
        return
    # Without the others: nothing is exchanged to count tensors.
    weights = weigh_rank(replace(spec, groups=Groups())).total
    if weights > free:
        where = "memory" if spec.device.type == "cpu" else f"memory of {spec.device}"
        raise ConfigError(
            f"the weights of this rank take {weights} bytes ({weights / _GIB:.1f} GiB), and "
            f"{free} bytes ({free / _GIB:.1f} GiB) of {where} are free; `glm-mesh plan` tells "
            "what a model needs and which layouts fit"
        )


def _free_bytes(device: torch.device) -> int | None:
    """What the device has free; None if nobody knows, or if it stores nothing."""
    if device.type == "meta":
        return None
    if device.type == "cpu":
        return free_host_bytes()
    free, _ = torch.accelerator.get_memory_info(device)
    return free
