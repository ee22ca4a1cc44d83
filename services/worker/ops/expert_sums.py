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
from types import MappingProxyType

import torch
from torch import Tensor

from services.worker.ops import nz
from services.worker.ops.checks import require
from services.worker.ops.native import Native

COUNTS = 1
NO_SCALE = 0
SCALE_TYPES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 1, torch.bfloat16: 2, torch.int64: 3}
)
"""Types of column scales, as the compiled kernels number them."""

_SHIFT = 8
_SUMS = "column_sums"
"""Attribute of a packed int4 weight, which cannot change: the sum of each column's weights."""


def num_columns(weight: Tensor) -> int:
    """N of int8 [groups, K, N] or int4 [groups, K, N / 8] weights."""
    return weight.shape[2] * (8 if weight.dtype is torch.int32 else 1)


def check_unset(operator: str, unused: Mapping[str, object]) -> None:
    """Arguments that ours do not compute with have a value that means none."""
    for argument, value in unused.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(f"{operator}: {argument} is not supported on CPU")


def check_weight(operator: str, x: Tensor, weight: Tensor, group_list: Tensor) -> None:
    """int8 rows by int8 or int4 matrices, an int64 entry for each."""
    is_right = weight.dtype is torch.int8 or weight.dtype is torch.int32
    require(is_right, operator, "weight {} must be int8, or int32 for int4", weight.dtype)
    is_right = x.dtype is torch.int8 and x.dim() == 2 and weight.dim() == 3
    is_right = is_right and x.shape[1] == weight.shape[1]
    require(is_right, operator, "x {} must be [M, K] int8, weight [groups, K, N]", x.shape)
    is_right = group_list.shape == weight.shape[:1] and group_list.dtype is torch.int64
    require(is_right, operator, "group_list {} must be [groups] int64", group_list.shape)


def check_scales(
    operator: str, x: Tensor, weight: Tensor, shape: tuple[int, ...], scale: Tensor, rows: Tensor
) -> None:
    """Column scales of this shape and the type that goes with the weights; float32 row scales."""
    is_int4 = weight.dtype is torch.int32
    is_right = (scale.dtype is torch.int64) == is_int4 and scale.dtype in SCALE_TYPES
    require(is_right, operator, "scale is {}: int64 bits for int4 weights, else fp32 or bf16",
            scale.dtype)  # fmt: skip
    require(scale.shape == shape, operator, "scale {} must have an entry per group and column",
            scale.shape)  # fmt: skip
    is_right = rows.shape == x.shape[:1] and rows.dtype is torch.float32
    require(is_right, operator, "row scales {} must be [M] float32", rows.shape)


def check_bias(operator: str, weight: Tensor, bias: Tensor | None) -> None:
    """int4 weights, and no others, have a float32 bias [groups, N]."""
    if weight.dtype is not torch.int32:
        require(bias is None, operator, "int8 weights have no bias")
        return
    shape = (weight.shape[0], num_columns(weight))
    is_right = bias is not None and bias.shape == shape and bias.dtype is torch.float32
    require(is_right, operator, "int4 weights need a float32 bias {}", shape)


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


def column_sums(native: Native, weight: Tensor) -> Tensor:
    """Sum of each column's int4 weights [groups, N] int32, by the compiled kernel."""
    known = getattr(weight, _SUMS, None)
    if known is not None:
        assert isinstance(known, Tensor)
        return known
    groups, inner = weight.shape[:2]
    ones = torch.ones(groups, inner, dtype=torch.int8)
    counts = torch.ones(groups, dtype=torch.int64)
    sums = torch.empty(groups, num_columns(weight), dtype=torch.int32)
    is_packed = nz.is_nz(weight)
    numbers = (groups, groups, inner, sums.shape[1], COUNTS, 4, is_packed, NO_SCALE)
    native.call(
        "grouped_int8", torch.float32, numbers, ones, weight, counts, ones, ones, ones, ones, sums
    )
    if is_packed:
        setattr(weight, _SUMS, sums)
    return sums
