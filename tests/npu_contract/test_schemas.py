"""The pinned schemas are the wheel's, and our kernels answer behind them."""

import os
from pathlib import Path

import pytest
import torch

from services.worker.ops import meta, registry
from services.worker.ops.schemas import SCHEMAS, TORCH_NPU_VERSION
from tools import npu_schemas


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_pinned_schema_equals_the_wheels(name: str) -> None:
    true = getattr(torch.ops.npu, name).default._schema
    pinned = torch._C.parse_schema(f"npu::{SCHEMAS[name]}")
    assert true == pinned
    assert str(true) == str(pinned)  # equality of schemas ignores the values of some defaults


def test_the_dump_finds_the_pinned_schemas_in_the_wheel() -> None:
    wheel = Path(os.environ["TORCH_NPU_WHEEL"])
    assert TORCH_NPU_VERSION in wheel.name
    assert npu_schemas.find_schemas(wheel) == SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_wheel_has_a_device_kernel_and_a_shape_function(name: str) -> None:
    for key in ("PrivateUse1", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", key), key


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_numeric_tests_call_through_the_true_schema(name: str) -> None:
    """Our own functions take what they are given; only the dispatcher knows the wheel's names."""
    for call in (registry.cpu_kernels(None)[name], meta.kernels()[name]):
        with pytest.raises((RuntimeError, TypeError), match=r"no_such_argument|missing value"):
            call(no_such_argument=1)


def test_the_versions_of_our_kernels_change_places() -> None:
    shown: list[str] = []
    from tools.npu_contract.plugin import Switchboard

    def kernels_of(native: object) -> dict[str, object]:
        def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
            shown.append(str(native))
            return input.clone()

        return {"npu_swiglu": swiglu}

    board = Switchboard(kernels_of)
    for native in ("first", "second", "first"):
        board.kernels(native)["npu_swiglu"](torch.zeros(1, 2))
    board.close()
    torch.ops.npu.npu_swiglu(torch.zeros(1, 2))
    assert shown == ["first", "second", "first"]
