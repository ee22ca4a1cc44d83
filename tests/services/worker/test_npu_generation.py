"""The generation whose cache types a worker uses."""

from types import SimpleNamespace

import pytest
import torch

from services.worker.npu_generation import choose_generation
from shared.errors import ConfigError

CPU, NPU = torch.device("cpu"), SimpleNamespace(type="npu")


def test_a_generation_that_was_asked_for_is_taken_as_it_is() -> None:
    for asked in ("a2", "a3", "a5"):
        assert choose_generation(asked, CPU) == asked


def test_a_cpu_is_laid_out_as_an_a3() -> None:
    assert choose_generation("auto", CPU) == "a3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Ascend910B1", "a2"),
        ("Ascend910B2C", "a2"),
        ("Ascend910B4-1", "a2"),
        ("Ascend910_9391", "a3"),
        ("Ascend910_9362", "a3"),
        ("Ascend950PR_9599", "a5"),
        ("Ascend950DT_95A1", "a5"),
    ],
)
def test_a_device_is_asked_for_its_name(
    name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(get_device_name=lambda device: name)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    assert choose_generation("auto", NPU) == expected


@pytest.mark.parametrize("name", ["Ascend910A", "Ascend910B", "Ascend310P3", ""])
def test_a_device_of_no_known_generation_is_refused_by_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(get_device_name=lambda device: name)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    with pytest.raises(ConfigError, match=f"--npu-generation auto: the device is '{name}'"):
        choose_generation("auto", NPU)
    assert choose_generation("a2", NPU) == "a2"
