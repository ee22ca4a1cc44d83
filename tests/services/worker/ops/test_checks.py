"""Refusals name the operator and the reason."""

import pytest
import torch

from services.worker.ops.checks import (
    require,
    require_contiguous,
    require_int32,
    require_same_float,
    require_step,
)


def test_what_holds_passes() -> None:
    require(True, "npu_x", "never said {}", object())
    require_same_float("npu_x", torch.zeros(1), torch.zeros(2))
    require_contiguous("npu_x", torch.zeros(2, 3))


def test_a_refusal_names_operator_reason_and_value() -> None:
    with pytest.raises(ValueError, match="npu_x: mode 7 must be 2"):
        require(False, "npu_x", "mode {} must be 2", 7)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.int8])
def test_mixed_types_are_refused(other: torch.dtype) -> None:
    with pytest.raises(ValueError, match="npu_x: types"):
        require_same_float("npu_x", torch.zeros(1), torch.zeros(1, dtype=other))


def test_types_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        require_same_float("npu_x", torch.zeros(1, dtype=torch.float16))


def test_a_view_is_refused_by_its_shape() -> None:
    with pytest.raises(ValueError, match=r"npu_x: input \(3, 2\)"):
        require_contiguous("npu_x", torch.zeros(2, 3).t())


def test_lengths_of_another_type_or_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        require_int32("npu_x", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="int32"):
        require_int32("npu_x", torch.zeros((4, 4), dtype=torch.int32)[:, :2])


def test_a_step_has_one_entry_per_sequence() -> None:
    two, three = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    require_step("npu_x", two, two, torch.zeros((2, 5), dtype=torch.int32))
    with pytest.raises(ValueError, match="2 ends, 2 lengths and 3 table rows"):
        require_step("npu_x", two, two, torch.zeros((3, 5), dtype=torch.int32))
    with pytest.raises(ValueError, match="2 ends, 3 lengths"):
        require_step("npu_x", two, three, torch.zeros((2, 5), dtype=torch.int32))
