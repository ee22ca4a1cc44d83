"""Which Atlas generation the caches are laid out for."""

import re

import torch

from services.worker.model.cache_format import Generation
from shared.errors import ConfigError

# Names of chips as torch_npu tells them (its SocVersion): 910B1 to 910B4 are A2, 910_93xx are A3.
_CHIPS: tuple[tuple[str, Generation], ...] = (
    (r"Ascend910B\d", "a2"),
    (r"Ascend910_93", "a3"),
    (r"Ascend950", "a5"),
)


def choose_generation(asked: str, device: torch.device) -> Generation:
    """The generation asked for; "auto" asks the device, and means A3 on a CPU.

    Raises:
        ConfigError: The device is none of them.
    """
    for _, generation in _CHIPS:
        if asked == generation:
            return generation
    return "a3" if device.type == "cpu" else _generation_of(_device_name(device))


def _device_name(device: torch.device) -> str:
    """The chip's name; torch_npu, which is loaded for such a device, adds the call to torch."""
    return str(torch.npu.get_device_name(device))  # type: ignore[attr-defined]  # by torch_npu


def _generation_of(name: str) -> Generation:
    for pattern, generation in _CHIPS:
        if re.match(pattern, name):
            return generation
    raise ConfigError(
        f"--npu-generation auto: the device is {name!r}, which is no Atlas A2, A3 or A5; name the "
        "generation whose caches it takes"
    )
