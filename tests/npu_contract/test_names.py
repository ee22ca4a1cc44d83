"""Every other name that the worker takes from torch_npu, or from torch for the device's sake."""

import contextlib
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import distributed

from services.worker.ops.schemas import TORCH_NPU_VERSION
from tools.npu_contract.names import Use, Way, find_uses

ROOT = Path(__file__).parents[2]
USES = find_uses(
    path for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py")
)
DEVICE_CALLS = [
    use for use in USES if use.name.startswith("torch.accelerator.") and use.num_positional == 1
]


LIBRARIES = {"torch": torch, "torch_npu": torch_npu}
# What calls give whose results are used further; there is no device to ask.
RESULTS = {"torch.npu.current_stream()": torch.npu.Stream}


def found(name: str) -> Any:
    """What a dotted name stands for."""
    for call, kind in RESULTS.items():
        if name.startswith(f"{call}."):
            return functools.partial(getattr(kind, name.removeprefix(f"{call}.")), object())
    start, _, rest = name.partition(".")
    return functools.reduce(getattr, rest.split("."), LIBRARIES[start])


@pytest.mark.parametrize("use", [use for use in USES if use.way is not Way.SET], ids=str)
def test_the_name_exists_and_takes_what_it_is_given(use: Use) -> None:
    target = found(use.name)
    if use.way is Way.CALLED:
        arguments = [object()] * use.num_positional
        named = dict.fromkeys(use.keywords, object())
        try:
            signature = inspect.signature(target)
        except ValueError:  # of C++, without one
            target(*arguments, **named)
        else:
            signature.bind(*arguments, **named)


@pytest.mark.parametrize("use", [use for use in USES if use.way is Way.SET], ids=str)
def test_the_name_may_be_set(use: Use) -> None:
    """Its owner takes any name and drops those that it does not know."""
    owner, _, name = use.name.rpartition(".")
    assert f'"{name}"' in inspect.getsource(type(found(owner)).__setattr__)


def test_the_wheel_is_the_pinned_version() -> None:
    assert torch_npu.__version__.split("+")[0] == TORCH_NPU_VERSION


def test_importing_the_wheel_makes_the_npu_a_device_and_the_accelerator() -> None:
    assert torch.device("npu").type == "npu"
    assert torch.accelerator.current_accelerator() == torch.device("npu")


@pytest.mark.parametrize("use", DEVICE_CALLS, ids=str)
def test_the_wheels_allocator_answers_torchs_memory_calls(use: Use) -> None:
    """Without a device the wheel may fail in CANN; torch alone would say "not implemented"."""
    with contextlib.suppress(RuntimeError):
        try:
            found(use.name)(torch.device("npu:0"))
        except NotImplementedError as error:
            pytest.fail(f"torch_npu does not provide it: {error}")


def test_there_are_memory_calls() -> None:
    assert len(DEVICE_CALLS) > 3


def test_groups_of_ranks_may_be_made_and_named() -> None:
    """What `services.worker.parallel.world` asks of communicators."""
    communicators = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    assert "hccl" in distributed.Backend.backend_list
    assert callable(communicators.get_hccl_comm_name)
    options = communicators.Options()
    options.hccl_config = {"group_name": "mc2", "hccl_buffer_size": 100}
    assert options.hccl_config == {"group_name": "mc2", "hccl_buffer_size": 100}


def test_a_weights_layout_can_be_asked_for() -> None:
    """What `services.worker.ops.nz` asks on a device."""
    schema = torch.ops.npu.get_npu_format.default._schema
    assert str(schema) == "npu::get_npu_format(Tensor input) -> int"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("npu::get_npu_format", "PrivateUse1")
