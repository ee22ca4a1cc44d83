"""The gated unit of experts in int8: alone on int32 sums, or with the first product before it.

Both end with the quantization of the rows for the second product.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_contiguous
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
from services.worker.ops.row_quant import quantize_rows

_FUSED = "npu_grouped_matmul_swiglu_quant_v2"
_GATED = "npu_dequant_swiglu_quant"
_WIDEST = 16384
"""Columns of one half that the compiled kernel has room for; the device takes 10496."""


def swiglu_quant(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    weight_assist_matrix: Sequence[Tensor] | None = None,
    group_list_type: int | None = 0,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """The first product of experts, ``silu(gate) * up``, and the next quantization.

    Args:
        x: [M, K] int8 rows sorted by group.
        weight: One tensor [groups, K, N] int8 or [groups, K, N / 8] int32 (int4), in the blocked
            layout; gate columns come before up's.
        weight_scale: One tensor [groups, N]: float32 or bfloat16, or for int4 int64, the bits of
            float32.
        x_scale: [M] float32 row scales.
        group_list: [groups] int64 inclusive ends (type 0) or counts (type 1).
        weight_assist_matrix: int4 only, and needed there: one tensor [groups, N] float32, the bias
            of the grouped product.
        group_list_type: 0 or 1.
        **unused: Other arguments; only their defaults are accepted.

    Returns:
        Rows [M, N / 2] int8, their scales [M] float32.
    """
    experts = _open(None, weight, weight_scale, weight_assist_matrix, unused)
    return _fused(experts, x, weight[0], x_scale, group_list, group_list_type)


def _native_swiglu_quant(
    native: Native,
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    weight_assist_matrix: Sequence[Tensor] | None = None,
    group_list_type: int | None = 0,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    experts = _open(native, weight, weight_scale, weight_assist_matrix, unused)
    return _native_fused(native, experts, x, weight[0], x_scale, group_list, group_list_type)


def _open(
    native: Native | None,
    weight: Sequence[Tensor],
    scale: Sequence[Tensor],
    assist: Sequence[Tensor] | None,
    unused: Mapping[str, object],
) -> Experts:
    check_unset(_FUSED, unused)
    is_right = len(weight) == len(scale) == 1 and (not assist or len(assist) == 1)
    require(is_right, _FUSED, "weights, scales and assist matrix must be one tensor each")
    bias = assist[0] if assist else None
    experts = open_experts(_FUSED, weight[0], scale[0], bias, int4_scale_dims=2, native=native)
    # The device reads the bytes as blocked ones, whatever they are.
    require(experts.is_packed, _FUSED, "weight must be in the blocked layout (NZ)")
    require(experts.outer % 2 == 0, _FUSED, "{} columns must be two halves", experts.outer)
    return experts


def _fused(
    experts: Experts,
    x: Tensor,
    weight: Tensor,
    row_scale: Tensor,
    group_list: Tensor,
    group_list_type: int | None,
) -> tuple[Tensor, Tensor]:
    check_rows(_FUSED, experts, x, row_scale, group_list)
    assert experts.scale is not None
    counts = counts_of(group_list, group_list_type)
    groups = groups_of(_FUSED, counts, len(x))
    sums = exact_sums(x, weight, counts)
    values = scale_sums(sums, groups, weight, experts.scale, experts.bias, row_scale)
    gate, up = values.chunk(2, dim=-1)
    return _quantized(torch.nn.functional.silu(gate) * up, len(x))


def _native_fused(
    native: Native,
    experts: Experts,
    x: Tensor,
    weight: Tensor,
    row_scale: Tensor,
    group_list: Tensor,
    group_list_type: int | None,
) -> tuple[Tensor, Tensor]:
    check_rows(_FUSED, experts, x, row_scale, group_list)
    assert experts.scale is not None
    total, outer = x.shape[0], experts.outer
    rows = torch.empty(total, outer // 2, dtype=torch.int8)
    scales = torch.empty(total, dtype=torch.float32)
    native.call(
        "grouped_swiglu",
        torch.float32,
        (
            total, experts.groups, experts.inner, outer, group_list_type == COUNTS, experts.bits,
            experts.scale_type,
        ),
        x,
        weight,
        group_list,
        experts.scale,
        row_scale,
        x if experts.bias is None else experts.bias,  # not read
        x if experts.column_sums is None else experts.column_sums,
        rows,
        scales,
    )  # fmt: skip
    return rows, scales


def dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Scale int32 sums, join their halves as ``silu(one) * other``, quantize again.

    Args:
        x: [T, N] int32 sums.
        weight_scale: Column scales [groups, N] float32; [N] or [1, N] without groups.
        activation_scale: Row scales [T] float32.
        group_index: [groups] int64 counts of rows; None for one group of all.
        activate_left: Whether the first half is the gate, or the second.
        quant_mode: 1 only: a scale per row.
        **unused: Other arguments; only their defaults are accepted.

    Returns:
        [T, N / 2] int8, [T] float32 scales.
    """
    factors, row_scale = _check_gated(
        x, weight_scale, activation_scale, group_index, quant_mode, unused
    )
    counts = torch.tensor([len(x)]) if group_index is None else group_index
    groups = groups_of(_GATED, counts, len(x))
    values = x[: len(groups)].float() * factors.view(len(counts), -1)[groups]
    left, right = (values * row_scale.view(-1, 1)[: len(groups)]).chunk(2, dim=-1)
    gate, up = (left, right) if activate_left else (right, left)
    return _quantized(torch.nn.functional.silu(gate) * up, len(x))


def _native_dequant_swiglu_quant(
    native: Native,
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    factors, row_scale = _check_gated(
        x, weight_scale, activation_scale, group_index, quant_mode, unused
    )
    total, width = x.shape[0], x.shape[1] // 2
    require(width <= _WIDEST, _GATED, "halves of {} columns are too wide on CPU", width)
    counts = x if group_index is None else group_index  # x: not read
    require_contiguous(_GATED, x, factors, row_scale, counts)
    rows = torch.empty(total, width, dtype=torch.int8)
    scales = torch.empty(total, dtype=torch.float32)
    groups = 0 if group_index is None else len(group_index)
    numbers = (total, width, groups, activate_left)
    native.call(
        "dequant_swiglu", torch.float32, numbers, x, factors, row_scale, counts, rows, scales
    )
    return rows, scales


def _check_gated(
    x: Tensor,
    weight_scale: Tensor | None,
    row_scale: Tensor | None,
    group_index: Tensor | None,
    quant_mode: int,
    unused: Mapping[str, object],
) -> tuple[Tensor, Tensor]:
    """Column scales and row scales."""
    check_unset(_GATED, unused)
    require(quant_mode == 1, _GATED, "quant_mode must be 1")
    is_right = x.dim() == 2 and x.dtype is torch.int32 and x.shape[1] % 2 == 0
    require(is_right, _GATED, "x {} must be [T, N] int32, two halves", x.shape)
    if weight_scale is None or row_scale is None:
        raise ValueError(f"{_GATED}: int32 sums need weight_scale and activation_scale")
    groups = 1 if group_index is None else len(group_index)
    is_right = weight_scale.numel() == groups * x.shape[1]
    require(is_right, _GATED, "weight_scale {} must be [groups, N]", weight_scale.shape)
    is_right = row_scale.numel() == x.shape[0]
    require(is_right, _GATED, "activation_scale {} must be [T]", row_scale.shape)
    is_right = weight_scale.dtype is row_scale.dtype is torch.float32
    require(is_right, _GATED, "scales must be float32")
    is_right = group_index is None or group_index.dtype is torch.int64
    require(is_right, _GATED, "group_index must be int64 counts")
    return weight_scale, row_scale


def _quantized(values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows in int8 and their scales; zeros up to `num_rows`."""
    found = quantize_rows(values)
    rows = torch.zeros((num_rows, values.shape[1]), dtype=torch.int8)
    scales = torch.zeros(num_rows)
    rows[: len(values)], scales[: len(values)] = found
    return rows, scales


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {_FUSED: swiglu_quant, _GATED: dequant_swiglu_quant}
    partial = functools.partial
    return {
        _FUSED: partial(_native_swiglu_quant, native),
        _GATED: partial(_native_dequant_swiglu_quant, native),
    }
