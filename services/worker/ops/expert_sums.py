"""Sums and scales of expert products in int8: rows sorted by expert, a matrix for each expert.

A value is ``sum * column scale * row scale`` with an exact integer sum, so it depends on no other
row. An NPU multiplies int4 weights W by int8 rows q in two halves, the lower of which it shifts by
8, and adds a bias that takes the shift back: ``((q - 8) @ W * scale + bias) * row scale``. Ours
computes the same from exact sums: a right bias (8 times the sum of a column's scaled weights)
leaves the plain integer product, a wrong one shows as it would there.

Rows past the last group are unspecified: zeros in the versions in torch, whatever lay in memory in
the compiled ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from services.worker.ops import nz
from services.worker.ops.checks import require, require_contiguous
from services.worker.ops.native import Native

COUNTS = 1
_NO_SCALE = 0
_SCALE_TYPES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 1, torch.bfloat16: 2, torch.int64: 3}
)
"""Types of column scales, as the compiled kernels number them."""

_SHIFT = 8
_CHECKED = "checked_experts"
"""Attribute of a packed weight, which cannot change: what was found when it was first used."""


@dataclass(frozen=True, slots=True)
class Experts:
    """One product's matrices with what belongs to them, checked."""

    groups: int
    inner: int
    outer: int
    bits: int
    is_packed: bool
    scale: Tensor | None
    scale_type: int
    bias: Tensor | None
    column_sums: Tensor | None
    """int4: sum of each column's weights [groups, N] int32, for the compiled kernels."""


def num_columns(weight: Tensor) -> int:
    """N of int8 [groups, K, N] or int4 [groups, K, N / 8] weights."""
    return weight.shape[2] * (8 if weight.dtype is torch.int32 else 1)


def check_unset(operator: str, unused: Mapping[str, object]) -> None:
    """Arguments that ours do not compute with have a value that means none."""
    for argument, value in unused.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(f"{operator}: {argument} is not supported on CPU")


def open_experts(
    operator: str,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    *,
    int4_scale_dims: int,
    native: Native | None = None,
) -> Experts:
    """Check the matrices and what belongs to them; remembered with a packed weight.

    Args:
        operator: For messages.
        weight: int8 [groups, K, N], or int4 as int32 [groups, K, N / 8].
        scale: Column scales [groups, N] (int4: int64, with a middle dimension of 1 if there are 3);
            None for sums.
        bias: [groups, N] float32 with int4 weights, and with no others.
        int4_scale_dims: 2 or 3.
        native: Finds the column sums that it needs.
    """
    known = getattr(weight, _CHECKED, None)
    if isinstance(known, Experts) and known.scale is scale and known.bias is bias:
        return known
    kind = weight.dtype
    is_right = kind is torch.int8 or kind is torch.int32
    require(is_right, operator, "weight {} must be int8, or int32 for int4", kind)
    require(weight.dim() == 3, operator, "weight {} must be [groups, K, N]", weight.shape)
    groups, inner, outer = weight.shape[0], weight.shape[1], num_columns(weight)
    is_int4 = kind is torch.int32
    middle = (1,) if is_int4 and int4_scale_dims > 2 else ()
    _check_scale(operator, scale, is_int4, (groups, *middle, outer))
    _check_bias(operator, bias, is_int4, (groups, outer))
    is_packed = nz.is_nz(weight)
    require_contiguous(operator, *(t for t in (scale, bias) if t is not None))
    if not is_packed:
        require_contiguous(operator, weight)
    sums = _column_sums(native, weight, is_packed) if is_int4 and native else None
    scale_type = _NO_SCALE if scale is None else _SCALE_TYPES[scale.dtype]
    bits = 4 if is_int4 else 8
    found = Experts(groups, inner, outer, bits, is_packed, scale, scale_type, bias, sums)
    if is_packed and native:
        setattr(weight, _CHECKED, found)
    return found


def _check_scale(
    operator: str, scale: Tensor | None, is_int4: bool, shape: tuple[int, ...]
) -> None:
    if scale is None:
        require(not is_int4, operator, "sums are of int8 weights, int4 weights need a scale")
        return
    is_right = (scale.dtype is torch.int64) == is_int4 and scale.dtype in _SCALE_TYPES
    require(is_right, operator, "scale is {}: int64 bits for int4 weights, else fp32 or bf16",
            scale.dtype)  # fmt: skip
    is_right = scale.shape == shape
    require(is_right, operator, "scale must have one entry per group and column: {}", shape)


def _check_bias(operator: str, bias: Tensor | None, is_int4: bool, shape: tuple[int, ...]) -> None:
    if not is_int4:
        require(bias is None, operator, "int8 weights have no bias")
        return
    is_right = bias is not None and bias.dtype is torch.float32 and bias.shape == shape
    require(is_right, operator, "int4 weights need a float32 bias {}", shape)


def _column_sums(native: Native, weight: Tensor, is_packed: bool) -> Tensor:
    groups, inner = weight.shape[:2]
    ones = torch.ones(groups, inner, dtype=torch.int8)
    counts = torch.ones(groups, dtype=torch.int64)
    sums = torch.empty(groups, num_columns(weight), dtype=torch.int32)
    numbers = (groups, groups, inner, sums.shape[1], COUNTS, 4, is_packed, _NO_SCALE)
    native.call(
        "grouped_int8", torch.float32, numbers, ones, weight, counts, ones, ones, ones, ones, sums
    )
    return sums


def check_rows(
    operator: str,
    experts: Experts,
    x: Tensor,
    row_scale: Tensor | None,
    group_list: Tensor | None,
) -> Tensor:
    """int8 rows [M, K], float32 scales [M] for them, an int64 entry for each group, all flat.

    Returns:
        The groups.
    """
    is_right = x.dtype is torch.int8 and x.dim() == 2 and x.shape[1] == experts.inner
    require(is_right and x.is_contiguous(), operator, "x must be flat [M, {}] int8", experts.inner)
    if group_list is None or group_list.dtype is not torch.int64:
        raise ValueError(f"{operator}: group_list must be int64")
    is_right = group_list.shape == (experts.groups,) and group_list.is_contiguous()
    require(is_right, operator, "group_list must have one entry per group: {}", experts.groups)
    if row_scale is not None:
        is_right = row_scale.dtype is torch.float32 and row_scale.shape == x.shape[:1]
        require(is_right and row_scale.is_contiguous(), operator, "row scales must be [M] float32")
    return group_list


def counts_of(group_list: Tensor, group_list_type: int | None) -> Tensor:
    """Rows of each group."""
    if group_list_type == COUNTS:
        return group_list
    return group_list.diff(prepend=group_list.new_zeros(1))


def groups_of(operator: str, counts: Tensor, num_rows: int) -> Tensor:
    """The group of each row that is in one."""
    is_right = bool((counts >= 0).all()) and int(counts.sum()) <= num_rows
    require(is_right, operator, "groups of {} do not fit the rows", counts)
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def exact_sums(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Products of the rows in groups [rows, N] int32."""
    # Whole numbers far below 2^53 are exact in float64, in any order.
    matrices = nz.plain(weight).double()
    parts = x[: int(counts.sum())].double().split(counts.tolist())
    products = [part @ matrix for part, matrix in zip(parts, matrices, strict=True)]
    return torch.cat(products).to(torch.int32)


def scale_sums(
    sums: Tensor,
    groups: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor,
) -> Tensor:
    """float32 values of exact sums."""
    if scale.dtype is torch.int64:
        scale = scale.to(torch.int32).view(torch.float32)
    factors = scale.float().reshape(len(scale), -1)
    values = sums.float() * factors[groups]
    if bias is not None:
        shift = _SHIFT * nz.plain(weight).sum(1, dtype=torch.int32).float()
        values = values + (bias - shift * factors)[groups]
    return values * row_scale[: len(groups), None]
