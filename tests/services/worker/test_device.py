import sys
from types import SimpleNamespace

import pytest
import torch

from services.worker import device as module
from services.worker.device import open_device
from shared.errors import ConfigError


def test_a_cpu_needs_nothing() -> None:
    assert open_device("cpu") == torch.device("cpu")


def test_an_npu_without_its_library_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="--device npu: torch_npu cannot be imported"):
        open_device("npu")


def test_an_npu_may_keep_weights_in_its_blocked_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(allow_internal_format=False)
    library = SimpleNamespace(npu=SimpleNamespace(config=config))
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    monkeypatch.setattr(module.torch, "device", lambda name: name)
    assert open_device("npu") == "npu"
    assert config.allow_internal_format
