"""Forms of tensor arguments: sizes by letter, element types, flat memory."""

import pytest
import torch

from services.worker.ops import nz
from services.worker.ops.form import FLOAT, INT8, INT32, WIDE, Blocked, Form


def check(form: Form, value: object, sizes: dict[str, int] | None = None) -> str:
    return form.find_violation(value, {} if sizes is None else sizes, set())


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_letter_takes_its_first_size_and_keeps_it() -> None:
    sizes: dict[str, int] = {}
    assert check(Form("T H 64"), meta(3, 4, 64), sizes) == ""
    assert sizes == {"T": 3, "H": 4}
    assert check(Form("T 1 1 64"), meta(3, 1, 1, 64), sizes) == ""
    assert "(5, 1, 1, 64) must be [T 1 1 64]" in check(Form("T 1 1 64"), meta(5, 1, 1, 64), sizes)


@pytest.mark.parametrize("shape", [(3, 4, 65), (3, 64), (3, 4, 1, 64)])
def test_other_numbers_and_ranks_are_refused(shape: tuple[int, ...]) -> None:
    assert "must be [T H 64]" in check(Form("T H 64"), meta(*shape))


def test_dots_stand_for_any_leading_sizes() -> None:
    for shape in [(8,), (3, 8), (3, 2, 8)]:
        assert check(Form("... E"), meta(*shape), {"E": 8}) == ""
    assert check(Form("... E"), meta(3, 9), {"E": 8})


def test_float32_is_for_the_cpu_alone() -> None:
    assert check(Form("T"), torch.zeros(2)) == ""
    assert "float32 must be bf16 or fp16" in check(Form("T"), meta(2, dtype=torch.float32))
    assert check(Form("T", WIDE), meta(2, dtype=torch.float32)) == ""


def test_floating_types_agree_within_a_call() -> None:
    types: set[torch.dtype] = set()
    assert Form("T", FLOAT).find_violation(meta(2), {}, types) == ""
    assert Form("T", INT32).find_violation(meta(2, dtype=torch.int32), {}, types) == ""
    assert "differs" in Form("T", FLOAT).find_violation(meta(2, dtype=torch.float16), {}, types)


def test_flat_memory_is_demanded_where_the_kernel_reads_it_so() -> None:
    view = meta(4, 3).t()
    assert check(Form("T N"), view) == ""
    assert "not contiguous" in check(Form("T N", is_flat=True), view)


def test_blocked_memory_is_for_the_kernels_that_read_it() -> None:
    plain = meta(2, 8, 32, dtype=torch.int8)
    blocked = nz.shaped(plain)
    refused, required = Form("G K N", INT8), Form("G K N", INT8, blocked=Blocked.REQUIRED)
    assert "is in the blocked layout (NZ)" in check(refused, blocked)
    assert "must be in the blocked layout (NZ)" in check(required, plain)
    assert check(refused, plain) == check(required, blocked) == ""
    allowed = Form("G K N", INT8, is_flat=True, blocked=Blocked.ALLOWED)
    assert check(allowed, plain) == check(allowed, blocked) == ""
    assert "not contiguous" in check(allowed, plain.transpose(1, 2).contiguous().transpose(1, 2))


def test_a_float_weight_that_is_packed_for_a_cpu_counts_as_flat() -> None:
    weight = torch.zeros(2, 8, 32, dtype=torch.bfloat16)
    assert check(Form("G K N", is_flat=True), nz.pack(weight)) == ""
    assert "not contiguous" in check(Form("G K N", is_flat=True), weight.transpose(1, 2))


@pytest.mark.parametrize("value", [None, 3, [meta(2), meta(2)]])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    assert check(Form("T"), value) == "must be one tensor [T]"
