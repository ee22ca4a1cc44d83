"""The grouped product of int8 rows with int8 or int4 matrices; `expert_sums` says what of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.ops.checks import require
from services.worker.ops.expert_sums import (
    COUNTS,
    Experts,
    check_rows,
    check_unset,
    counts_of,
    exact_sums,
    groups_of,
    open_experts,
    scale_sums,
)
from services.worker.ops.native import Native
from services.worker.ops.scalar_types import to_dtype

_NAME = "npu_grouped_matmul"
_INT4_SCALE_DIMS = 3


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor | None,
    group_list_type: int | None,
    *,
    scale: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    output_dtype: object = None,
    **unused: object,
) -> list[Tensor]:
    """Multiply each group of int8 rows by its expert's matrix.

    Args:
        x: [M, K] int8 with rows sorted by group.
        weight: [groups, K, N] int8, or [groups, K, N / 8] int32 (int4).
        group_list: [groups] int64 counts (type 1) or inclusive ends (type 0); int4: counts.
        group_list_type: 0 or 1.
        scale: Column scales [groups, N] bfloat16 or float32; int4: [groups, 1, N] int64, the bits
            of float32. None for sums.
        bias: int4 only, and needed there: [groups, N] float32.
        per_token_scale: Row scales [M] float32.
        output_dtype: bfloat16 or float32, or int32 for the sums.
        **unused: Other arguments; any that is set is refused.

    Returns:
        One tensor [M, N].
    """
    check_unset(_NAME, unused)
    row_scale = _only(per_token_scale)
    experts = _open(None, weight, scale, bias)
    group_list = check_rows(_NAME, experts, x, row_scale, group_list)
    dtype = _check(experts, row_scale, group_list_type, output_dtype)
    counts = counts_of(group_list, group_list_type)
    groups = groups_of(_NAME, counts, len(x))
    sums = exact_sums(x, weight, counts)
    if experts.scale is not None and row_scale is not None:
        sums = scale_sums(sums, groups, weight, experts.scale, experts.bias, row_scale)
    output = torch.zeros((len(x), experts.outer), dtype=dtype)
    output[: len(sums)] = sums.to(dtype)
    return [output]


def native_grouped_matmul(
    native: Native,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor | None,
    group_list_type: int | None,
    *,
    scale: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    output_dtype: object = None,
    **unused: object,
) -> list[Tensor]:
    """`grouped_matmul` by the compiled kernel."""
    check_unset(_NAME, unused)
    row_scale = _only(per_token_scale)
    experts = _open(native, weight, scale, bias)
    group_list = check_rows(_NAME, experts, x, row_scale, group_list)
    dtype = _check(experts, row_scale, group_list_type, output_dtype)
    rows, outer = x.shape[0], experts.outer
    output = torch.empty(rows, outer, dtype=dtype)
    native.call(
        "grouped_int8",
        torch.bfloat16 if dtype is torch.bfloat16 else torch.float32,
        (
            rows, experts.groups, experts.inner, outer, group_list_type == COUNTS,
            experts.bits, experts.is_packed, experts.scale_type,
        ),
        x,
        weight,
        group_list,
        # A tensor that is not there has its place taken by another; the kernel does not read it.
        x if experts.scale is None else experts.scale,
        x if row_scale is None else row_scale,
        x if experts.bias is None else experts.bias,
        x if experts.column_sums is None else experts.column_sums,
        output,
    )  # fmt: skip
    return [output]


def _only(tensors: Sequence[Tensor] | None) -> Tensor | None:
    if not tensors:
        return None
    require(len(tensors) == 1, _NAME, "{} tensors must be one", len(tensors))
    return tensors[0]


def _open(
    native: Native | None,
    weight: Tensor,
    scale: Sequence[Tensor] | None,
    bias: Sequence[Tensor] | None,
) -> Experts:
    return open_experts(
        _NAME, weight, _only(scale), _only(bias), int4_scale_dims=_INT4_SCALE_DIMS, native=native
    )


def _check(
    experts: Experts, row_scale: Tensor | None, group_list_type: int | None, output_dtype: object
) -> torch.dtype:
    """The type of the result."""
    dtype = to_dtype(output_dtype)
    if dtype is torch.int32:
        is_right = experts.scale is row_scale is None
        require(is_right, _NAME, "int32 sums are of int8 weights, without scales")
        return dtype
    if dtype is not torch.bfloat16 and dtype is not torch.float32:
        raise ValueError(f"{_NAME}: output_dtype {dtype} must be bfloat16, float32 or int32")
    is_right = experts.scale is not None and row_scale is not None
    require(is_right, _NAME, "int8 rows need scale and per_token_scale")
    is_right = experts.bits == 8 or group_list_type == COUNTS
    require(is_right, _NAME, "int4 weights: group_list must be counts (type 1)")
    return dtype
