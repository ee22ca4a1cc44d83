"""Every other name that the worker takes from torch_npu, or from torch for the device's sake."""

import ast
import contextlib
import functools
import inspect
from pathlib import Path

import pytest
import torch
import torch_npu

from services.worker.ops.schemas import TORCH_NPU_VERSION

ROOT = Path(__file__).parents[2]
PREFIXES = ("torch.accelerator.", "torch.npu.", "torch_npu.")
# What `services.worker.capacity` calls with one device, and how often it expects what.
CALLED_WITH_A_DEVICE = (
    "torch.accelerator.get_memory_info",
    "torch.accelerator.max_memory_reserved",
    "torch.accelerator.memory_reserved",
    "torch.accelerator.reset_peak_memory_stats",
    "torch.accelerator.synchronize",
)
# What `services.worker.npu_generation` calls; without a device the wheel has none to name.
NAMES_THE_CHIP = ("torch.npu.get_device_name",)
CALLED_WITH_NOTHING = ("torch.accelerator.empty_cache",)


@functools.cache
def names_in_use() -> set[str]:
    """Dotted names below the prefixes in the worker's and the shared sources."""
    found: set[str] = set()
    for folder in ("services", "shared"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                if text.startswith(PREFIXES):
                    found.add(text)
    return found


def test_every_name_in_use_is_checked_here() -> None:
    assert names_in_use() == {*CALLED_WITH_A_DEVICE, *NAMES_THE_CHIP, *CALLED_WITH_NOTHING}


@pytest.mark.parametrize("name", [*CALLED_WITH_A_DEVICE, *NAMES_THE_CHIP])
def test_the_name_takes_one_device(name: str) -> None:
    inspect.signature(functools.reduce(getattr, name.split(".")[1:], torch)).bind(object())


@pytest.mark.parametrize("name", CALLED_WITH_NOTHING)
def test_the_name_takes_nothing(name: str) -> None:
    inspect.signature(functools.reduce(getattr, name.split(".")[1:], torch)).bind()


def test_the_wheel_is_the_pinned_version() -> None:
    assert torch_npu.__version__.split("+")[0] == TORCH_NPU_VERSION


def test_importing_the_wheel_makes_the_npu_a_device_and_the_accelerator() -> None:
    assert torch.device("npu").type == "npu"
    assert torch.accelerator.current_accelerator() == torch.device("npu")


@pytest.mark.parametrize("name", CALLED_WITH_A_DEVICE)
def test_the_wheels_allocator_answers_torchs_memory_calls(name: str) -> None:
    """Without a device the wheel may fail in CANN; torch alone would say "not implemented"."""
    call = functools.reduce(getattr, name.split(".")[1:], torch)
    with contextlib.suppress(RuntimeError):
        try:
            call(torch.device("npu:0"))
        except NotImplementedError as error:
            pytest.fail(f"torch_npu does not provide it: {error}")
