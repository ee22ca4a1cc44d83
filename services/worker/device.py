"""Where the model runs."""

import importlib

import torch

from shared.errors import ConfigError


def open_device(name: str) -> torch.device:
    """The device; an NPU's operators and groups come with its library, which is imported here.

    Raises:
        ConfigError: The library is not there.
    """
    if name == "npu":
        try:
            library = importlib.import_module("torch_npu")
        except ImportError as error:
            raise ConfigError(f"--device npu: torch_npu cannot be imported: {error}") from error
        # Otherwise a cast to the blocked layout may leave a weight as it is.
        library.npu.config.allow_internal_format = True
    return torch.device(name)
