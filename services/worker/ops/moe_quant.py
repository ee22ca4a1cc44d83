"""The grouped product of int8 rows with int8 or int4 matrices; `expert_sums` says what of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.ops import nz
from services.worker.ops.checks import require, require_contiguous
from services.worker.ops.expert_sums import (
    COUNTS,
    NO_SCALE,
    SCALE_TYPES,
    check_bias,
    check_scales,
    check_unset,
    check_weight,
    column_sums,
    counts_of,
    exact_sums,
    groups_of,
    num_columns,
    scale_sums,
)
from services.worker.ops.native import Native
from services.worker.ops.scalar_types import to_dtype

_NAME = "npu_grouped_matmul"


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
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
    scales = (_only(scale), _only(per_token_scale), _only(bias))
    dtype = _check(x, weight, group_list, group_list_type, scales, output_dtype, unused)
    counts = counts_of(group_list, group_list_type)
    groups = groups_of(_NAME, counts, len(x))
    sums = exact_sums(x, weight, counts)
    columns, rows, added = scales
    if columns is not None and rows is not None:
        sums = scale_sums(sums, groups, weight, columns, added, rows)
    output = torch.zeros((len(x), sums.shape[1]), dtype=dtype)
    output[: len(sums)] = sums.to(dtype)
    return [output]


def native_grouped_matmul(
    native: Native,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    group_list_type: int | None,
    *,
    scale: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    output_dtype: object = None,
    **unused: object,
) -> list[Tensor]:
    """`grouped_matmul` by the compiled kernel."""
    columns, rows, added = scales = (_only(scale), _only(per_token_scale), _only(bias))
    dtype = _check(x, weight, group_list, group_list_type, scales, output_dtype, unused)
    is_packed = nz.is_nz(weight)
    require_contiguous(_NAME, x, group_list, *(() if is_packed else (weight,)))
    (num_rows, inner), groups, outer = x.shape, weight.shape[0], num_columns(weight)
    output = torch.empty(num_rows, outer, dtype=dtype)
    # A tensor that is not there has its place taken by another; the kernel does not read it.
    pointers, scale_type, bits = [x, x, x, x], NO_SCALE, 8
    if columns is not None and rows is not None:
        require_contiguous(_NAME, columns, rows)
        pointers[:2] = columns, rows
        scale_type = SCALE_TYPES[columns.dtype]
    if added is not None:
        require_contiguous(_NAME, added)
        pointers[2:] = added, column_sums(native, weight)
        bits = 4
    is_counts = group_list_type == COUNTS
    native.call(
        "grouped_int8",
        torch.bfloat16 if dtype is torch.bfloat16 else torch.float32,
        (num_rows, groups, inner, outer, is_counts, bits, is_packed, scale_type),
        x, weight, group_list, *pointers, output,
    )  # fmt: skip
    return [output]


def _only(tensors: Sequence[Tensor] | None) -> Tensor | None:
    if not tensors:
        return None
    require(len(tensors) == 1, _NAME, "{} tensors must be one", len(tensors))
    return tensors[0]


def _check(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    group_list_type: int | None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    output_dtype: object,
    unused: dict[str, object],
) -> torch.dtype:
    """The type of the result."""
    check_unset(_NAME, unused)
    check_weight(_NAME, x, weight, group_list)
    dtype = to_dtype(output_dtype)
    is_int4 = weight.dtype is torch.int32
    if dtype is torch.int32:
        is_right = not is_int4 and scales == (None, None, None)
        require(is_right, _NAME, "int32 sums are of int8 weights, without scales")
        return dtype
    if dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"{_NAME}: output_dtype {dtype} must be bfloat16, float32 or int32")
    columns, rows, bias = scales
    if columns is None or rows is None:
        raise ValueError(f"{_NAME}: int8 rows need scale and per_token_scale")
    outer = num_columns(weight)
    shape = (weight.shape[0], 1, outer) if is_int4 else (weight.shape[0], outer)
    check_scales(_NAME, x, weight, shape, columns, rows)
    check_bias(_NAME, weight, bias)
    is_right = not is_int4 or group_list_type == COUNTS
    require(is_right, _NAME, "int4 weights: group_list must be counts (type 1)")
    return dtype
