"""Routed experts: choice, sorting by expert, grouped products, weighted sum.

The order of use is gating, init_routing, grouped matmul, swiglu, grouped matmul, unpermute.
Products in int8 are in `moe_quant`, those with swiglu in `moe_gated`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from services.worker.ops import dense, moe_quant
from services.worker.ops.checks import require, require_contiguous, require_same_float
from services.worker.ops.native import Native
from services.worker.ops.row_quant import quantize_rows

_GATING = "npu_moe_gating_top_k"
_ROUTING = "npu_moe_init_routing_v2"
_GROUPED = "npu_grouped_matmul"
_UNPERMUTE = "npu_moe_token_unpermute"
_SIGMOID = 1
_TOP2_SUM = 1
_COUNTS = 1
_PLAIN, _QUANTIZED = -1, 1
_SPLIT_ROWS = 0
_ONE_OUTPUT = (2, 3)


def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose `k` experts per token from router logits.

    Args:
        x: [T, N] float32 logits.
        k: Experts per token.
        bias: [N] correction, added to the scores for the choice only.
        k_group: Groups that may be chosen from.
        group_count: Groups the experts are cut into.
        group_select_mode: 1 only: a group counts as the sum of its two best experts.
        norm_type: 1 only: sigmoid scores, chosen ones divided by their sum.
        routed_scaling_factor: Factor on the weights.
        eps: Added to the sum before the division.
        **unused: Other arguments; only their defaults are accepted.

    Returns:
        [T, k] weights, [T, k] int32 experts (lower expert first where scores tie), an unused
        [T, N] tensor.
    """
    _check_gating(x, bias, k_group, group_count, group_select_mode, norm_type, unused)
    scores = torch.sigmoid(x.float())
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        choice = _mask_groups(choice, k_group, group_count)
    experts = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), experts.to(torch.int32), torch.empty(x.shape, dtype=torch.float32)


def _mask_groups(choice: Tensor, k_group: int, group_count: int) -> Tensor:
    grouped = choice.view(choice.shape[0], group_count, -1)
    ranks = grouped.topk(2, dim=-1).values.sum(-1)
    best = torch.sort(ranks, dim=-1, descending=True, stable=True).indices[:, :k_group]
    is_open = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, best, value=True)
    return grouped.masked_fill(~is_open[..., None], float("-inf")).view(choice.shape)


def _native_gating(
    native: Native,
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_gating(x, bias, k_group, group_count, group_select_mode, norm_type, unused)
    require(x.dtype == torch.float32, _GATING, "x must be float32 on CPU")
    require_contiguous(_GATING, x)
    tokens, num_experts = x.shape
    weights = x.new_empty(tokens, k)
    experts = torch.empty(tokens, k, dtype=torch.int32)
    shifts = x.new_zeros(num_experts) if bias is None else bias
    numbers = (tokens, num_experts, k, k_group, group_count, routed_scaling_factor, eps)
    native.call("gating_top_k", x.dtype, numbers, x, shifts, weights, experts)
    return weights, experts, x.new_empty(tokens, num_experts)


def _check_gating(
    x: Tensor,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    norm_type: int,
    unused: dict[str, object],
) -> None:
    require(x.dim() == 2, _GATING, "x must be [T, experts]")
    require(norm_type == _SIGMOID, _GATING, "norm_type must be 1 (sigmoid)")
    require(bias is None or bias.shape == x.shape[1:], _GATING, "bias must be [experts]")
    require(x.shape[1] % group_count == 0, _GATING, "group_count must divide the experts")
    require(k_group <= group_count, _GATING, "k_group must be at most group_count")
    is_ranked = group_count == 1 or group_select_mode == _TOP2_SUM
    require(is_ranked, _GATING, "group_select_mode must be 1 (sum of the two best)")
    require(not unused.get("renorm"), _GATING, "renorm must be 0")
    require(not unused.get("out_flag"), _GATING, "out_flag is not supported on CPU")


def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort token copies by expert.

    Args:
        x: [T, E]; int8 with `scale`.
        expert_idx: [T, k] int32.
        scale: [T] float32 row scales of an int8 `x`, sorted with it.
        active_num: T * k, or -1 for the same.
        expert_num: Experts in all.
        expert_tokens_num_type: 1 only: counts.
        expert_tokens_num_flag: True only.
        quant_mode: -1 for none, 1 to quantize each row to int8 with a scale of its own.
        active_expert_range: [first, last) experts of this rank; empty for all.
        **unused: Other arguments; only their defaults are accepted.

    Returns:
        [T * k, E] rows by expert (rows past the last count unspecified); [T * k] int32 sorted row
        of each copy, -1 outside the range; counts int64; [T * k] float32 scales of int8 rows, else
        an empty tensor.
    """
    first, last = _check_routing(
        x, expert_idx, scale, expert_num, (expert_tokens_num_flag, expert_tokens_num_type),
        quant_mode, active_expert_range, unused,
    )  # fmt: skip
    flat = expert_idx.reshape(-1).long()
    is_local = (flat >= first) & (flat < last)
    order = torch.sort(torch.where(is_local, flat, expert_num), stable=True).indices
    destinations = torch.empty_like(flat)
    destinations[order] = torch.arange(flat.numel())
    destinations.masked_fill_(~is_local, -1)
    counts = torch.bincount(flat[is_local] - first, minlength=last - first)
    source = order // expert_idx.shape[1]
    if quant_mode == _QUANTIZED:
        x, scale = quantize_rows(x)
    scales = torch.empty(0) if scale is None else scale[source]
    return x[source], destinations.to(torch.int32), counts, scales


def _native_init_routing(
    native: Native,
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, last = _check_routing(
        x, expert_idx, scale, expert_num, (expert_tokens_num_flag, expert_tokens_num_type),
        quant_mode, active_expert_range, unused,
    )  # fmt: skip
    require_contiguous(_ROUTING, x, expert_idx)
    tokens, k = expert_idx.shape
    width = x.shape[1]
    destinations = torch.empty(tokens * k, dtype=torch.int32)
    counts = torch.empty(last - first, dtype=torch.int64)
    numbers = (tokens, k, width, first, last)
    if quant_mode == _PLAIN and scale is None:
        rows = x.new_empty(tokens * k, width)
        native.call("init_routing", x.dtype, numbers, x, expert_idx, rows, destinations, counts)
        return rows, destinations, counts, torch.empty(0)
    rows = torch.empty(tokens * k, width, dtype=torch.int8)
    scales = torch.empty(tokens * k, dtype=torch.float32)
    # Without scales that came in, another tensor has their place and is not read.
    kind, given = (x.dtype, x) if scale is None else (torch.float32, scale.contiguous())
    native.call(
        "init_routing_int8", kind, (*numbers, scale is not None),
        x, given, expert_idx, rows, destinations, counts, scales,
    )  # fmt: skip
    return rows, destinations, counts, scales


def _check_routing(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    expert_num: int,
    counting: tuple[bool, int],
    quant_mode: int,
    active_range: Sequence[int],
    unused: dict[str, object],
) -> tuple[int, int]:
    """First expert here and one past the last."""
    is_matching = x.dim() == 2 and expert_idx.dim() == 2 and x.shape[0] == expert_idx.shape[0]
    require(is_matching, _ROUTING, "x must be [T, E], expert_idx [T, k]")
    require(expert_idx.dtype == torch.int32, _ROUTING, "expert_idx must be int32")
    require(counting == (True, _COUNTS), _ROUTING, "only counts are supported")
    _check_row_types(x, scale, quant_mode)
    for argument in ("offset", "x_dtype"):
        require(unused.get(argument) is None, _ROUTING, "{} is not supported on CPU", argument)
    for argument in ("drop_pad_mode", "row_idx_type"):
        require(not unused.get(argument), _ROUTING, "{} must be 0", argument)
    first, last = active_range or (0, expert_num)
    require(0 <= first < last <= expert_num, _ROUTING, "active_expert_range must be increasing")
    return first, last


def _check_row_types(x: Tensor, scale: Tensor | None, quant_mode: int) -> None:
    """Float rows, to be quantized or not; or int8 rows with their scales."""
    require(quant_mode in {_PLAIN, _QUANTIZED}, _ROUTING, "quant_mode must be -1 or 1")
    if x.dtype is not torch.int8:
        require_same_float(_ROUTING, x)
        require(scale is None, _ROUTING, "scale belongs to an int8 x")
        return
    require(quant_mode == _PLAIN, _ROUTING, "an int8 x cannot be quantized again")
    is_right = scale is not None and scale.shape == x.shape[:1] and scale.dtype is torch.float32
    require(is_right, _ROUTING, "an int8 x needs a scale [T] float32")


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **options: Any,  # noqa: ANN401  typed where they are used
) -> list[Tensor]:
    """Multiply each group of rows by its expert's matrix.

    Args:
        x: One tensor [M, K] with rows sorted by group; int8: see `moe_quant.grouped_matmul`.
        weight: One tensor [groups, K, N].
        group_list: [groups] int64 counts (type 1) or inclusive ends (type 0).
        split_item: 2 or 3: one output.
        group_type: 0 only: the rows are split.
        group_list_type: 0 or 1.
        **options: Of products in int8; any that is set is refused for others.

    Returns:
        One tensor [M, N]; rows past the last group are unspecified (zeros here).
    """
    _check_split(x, weight, split_item, group_type)
    if x[0].dtype is torch.int8:
        return moe_quant.grouped_matmul(x[0], weight[0], group_list, group_list_type, **options)
    groups = _check_float(x[0], weight[0], group_list, options)
    counts = groups if group_list_type == _COUNTS else groups.diff(prepend=groups.new_zeros(1))
    output = torch.zeros((x[0].shape[0], weight[0].shape[2]), dtype=x[0].dtype)
    start = 0
    for group, count in enumerate(counts.tolist()):
        output[start : start + count] = x[0][start : start + count] @ weight[0][group]
        start += count
    return [output]


def _native_grouped_matmul(
    native: Native,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **options: Any,  # noqa: ANN401  typed where they are used
) -> list[Tensor]:
    _check_split(x, weight, split_item, group_type)
    if x[0].dtype is torch.int8:
        return moe_quant.native_grouped_matmul(
            native, x[0], weight[0], group_list, group_list_type, **options
        )
    groups = _check_float(x[0], weight[0], group_list, options)
    require_contiguous(_GROUPED, x[0], groups)
    packed = dense.is_packed(_GROUPED, weight[0])
    num_groups, inner, outer = weight[0].shape
    num_rows = x[0].shape[0]
    output = x[0].new_empty(num_rows, outer)
    numbers = (num_rows, num_groups, inner, outer, group_list_type == _COUNTS, packed)
    native.call("grouped_matmul", x[0].dtype, numbers, x[0], weight[0], groups, output)
    return [output]


def _check_split(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    split_item: int | None,
    group_type: int | None,
) -> None:
    require(len(x) == 1 and len(weight) == 1, _GROUPED, "x and weight must be one tensor each")
    require(split_item in _ONE_OUTPUT, _GROUPED, "split_item must be 2 or 3")
    require(group_type == _SPLIT_ROWS, _GROUPED, "group_type must be 0")


def _check_float(
    x: Tensor, weight: Tensor, group_list: Tensor | None, options: dict[str, object]
) -> Tensor:
    """The groups."""
    for argument, value in options.items():
        require(not value, _GROUPED, "{} is not supported on CPU", argument)
    require(x.dim() == 2 and weight.dim() == 3, _GROUPED, "x [M, K], weight [groups, K, N]")
    require(x.shape[1] == weight.shape[1], _GROUPED, "x and weight differ in K")
    require_same_float(_GROUPED, x, weight)
    if group_list is None or group_list.shape != weight.shape[:1]:
        raise ValueError(f"{_GROUPED}: group_list must have one entry per group")
    require(group_list.dtype == torch.int64, _GROUPED, "group_list must be int64")
    return group_list


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(first half) * second half`` along the last dimension."""
    require(dim in {-1, input.dim() - 1}, "npu_swiglu", "dim must be the last")
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def _native_swiglu(native: Native, input: Tensor, dim: int = -1) -> Tensor:
    require(dim in {-1, input.dim() - 1}, "npu_swiglu", "dim must be the last")
    require_contiguous("npu_swiglu", input)
    *rows, double = input.shape
    width = double // 2
    output = input.new_empty(*rows, width)
    native.call("swiglu", input.dtype, (math.prod(rows), width), input, output)
    return output


def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """``out[t] = sum_j probs[t, j] * permuted[sorted_indices[t * k + j]]``, summed in float32."""
    weights = _check_unpermute(sorted_indices, probs, padded_mode, restore_shape)
    tokens, k = weights.shape
    rows = permuted_tokens[sorted_indices.long()].view(tokens, k, -1).float()
    return (rows * weights.float()[..., None]).sum(1).to(permuted_tokens.dtype)


def _native_unpermute(
    native: Native,
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    weights = _check_unpermute(sorted_indices, probs, padded_mode, restore_shape)
    require_same_float(_UNPERMUTE, permuted_tokens, weights)
    require_contiguous(_UNPERMUTE, permuted_tokens, weights, sorted_indices)
    tokens, k = weights.shape
    width = permuted_tokens.shape[1]
    output = permuted_tokens.new_empty(tokens, width)
    native.call(
        "token_unpermute", permuted_tokens.dtype, (tokens, k, width, permuted_tokens.shape[0]),
        permuted_tokens, sorted_indices, weights, output,
    )  # fmt: skip
    return output


def _check_unpermute(
    sorted_indices: Tensor, probs: Tensor | None, padded_mode: bool, restore_shape: object
) -> Tensor:
    if probs is None or probs.dim() != 2:
        raise ValueError(f"{_UNPERMUTE}: probs must be [T, k]")
    require(sorted_indices.shape == (probs.numel(),), _UNPERMUTE, "indices must be [T * k]")
    require(sorted_indices.dtype == torch.int32, _UNPERMUTE, "indices must be int32")
    require(not padded_mode, _UNPERMUTE, "padded_mode is not supported")
    require(restore_shape is None, _UNPERMUTE, "restore_shape is not supported")
    return probs


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {
            _GATING: gating_top_k,
            _ROUTING: init_routing,
            _GROUPED: grouped_matmul,
            "npu_swiglu": swiglu,
            _UNPERMUTE: token_unpermute,
        }
    partial = functools.partial
    return {
        _GATING: partial(_native_gating, native),
        _ROUTING: partial(_native_init_routing, native),
        _GROUPED: partial(_native_grouped_matmul, native),
        "npu_swiglu": partial(_native_swiglu, native),
        _UNPERMUTE: partial(_native_unpermute, native),
    }
