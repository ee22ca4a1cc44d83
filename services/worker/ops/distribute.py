"""The fused exchange of experts' tokens: sort and send, and the weighted sums on their way back.

An NPU does it in one kernel over windows of device memory. Here rows go by all-to-all of torch's
functional collectives, which find a process group by its name as the device's kernel finds its
communicator. Shapes are the device's: room for every token of every rank, of which `counts` rows
are filled. What the device hands from dispatch to combine in `assist_info_for_combine` is known
here without it.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_same_float
from services.worker.ops.native import Native
from services.worker.ops.row_quant import quantize_rows

_DISPATCH = "npu_moe_distribute_dispatch_v2"
_COMBINE = "npu_moe_distribute_combine_v2"
_PLAIN, _DYNAMIC_INT8 = 0, 2
_COUNTS = 1
_INFO_PER_ROW = 128


def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    quant_mode: int = 0,
    expert_token_nums_type: int = 1,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send each token to the ranks of its experts, which hold as many each, in order.

    Args:
        x: [T, E], as many rows on every rank.
        expert_ids: [T, k] int32, distinct in a row.
        group_ep: Name of the group.
        ep_world_size: Its ranks.
        ep_rank_id: This rank.
        moe_expert_num: Experts on all ranks.
        x_active_mask: [T] bool, rows that are tokens, before those that are not; None: all.
        expert_scales: [T, k] float32 weights to send along.
        quant_mode: 0 for none, 2 to quantize each row to int8 with a scale of its own.
        expert_token_nums_type: 1 only: counts.
        **unused: Other arguments; their defaults only.

    Returns:
        [A, E] rows by expert, then rank, A = T * ranks * min(experts here, k), unset past the last
        count; [A] float32 scales of int8 rows; int32 notes for the combine; [G] int64 counts;
        [G * ranks] int32 prefix sums by expert and rank; empty; [A] float32 weights or empty.
    """
    _check(_DISPATCH, expert_ids, ep_world_size, ep_rank_id, moe_expert_num, x_active_mask, unused)
    _check_sent(x, expert_ids, quant_mode, expert_token_nums_type)
    copies = _Copies(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    sent = copies.counts.view(ep_world_size, -1)
    received = _exchange(sent, None, None, group_ep)
    tokens, k = expert_ids.shape
    room = tokens * ep_world_size * min(sent.shape[1], k)
    splits = (received.sum(1).tolist(), sent.sum(1).tolist())
    move = functools.partial(_move, splits, group_ep, _by_expert(received), room)
    scales = x.new_empty(room, dtype=torch.float32)
    if quant_mode == _DYNAMIC_INT8:
        x, row_scales = quantize_rows(x)
        scales = move(row_scales, copies.sources)
    sums = received.t().flatten().cumsum(0).to(torch.int32)
    weights = x.new_empty(0, dtype=torch.float32)
    if expert_scales is not None:
        weights = move(expert_scales.flatten(), copies.places)
        # The device keeps notes on partial sums between machines behind the counts.
        notes = 2 * tokens * ep_world_size * k * (ep_world_size // 8)
        sums = torch.cat((sums, sums.new_zeros(notes)))
    info = torch.empty(max(tokens * k, _INFO_PER_ROW * room), dtype=torch.int32)
    return move(x, copies.sources), scales, info, received.sum(0), sums, sums.new_empty(0), weights


def _move(
    splits: tuple[list[int], list[int]],
    group: str,
    order: Tensor,
    room: int,
    rows: Tensor,
    chosen: Tensor,
) -> Tensor:
    """Exchange the chosen rows; what arrives is put in order, into `room` rows."""
    arrived = _exchange(rows[chosen], *splits, group)[order]
    moved = rows.new_empty((room, *rows.shape[1:]))
    moved[: len(arrived)] = arrived
    return moved


def _check_sent(x: Tensor, expert_ids: Tensor, quant_mode: int, nums_type: int) -> None:
    require_same_float(_DISPATCH, x)
    require(len(x) == len(expert_ids), _DISPATCH, "x and expert_ids must have as many rows")
    require(quant_mode in {_PLAIN, _DYNAMIC_INT8}, _DISPATCH, "quant_mode must be 0 or 2")
    require(nums_type == _COUNTS, _DISPATCH, "only counts are supported")


def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    **unused: object,
) -> Tensor:
    """Bring results back to their tokens and add them up.

    Args:
        expand_x: [A, E] results of the rows that `dispatch` gave.
        expert_ids: As for `dispatch`.
        assist_info_for_combine: From `dispatch`.
        ep_send_counts: Its prefix sums.
        expert_scales: [T, k] float32 weights.
        group_ep: As for `dispatch`.
        ep_world_size: As for `dispatch`.
        ep_rank_id: As for `dispatch`.
        moe_expert_num: As for `dispatch`.
        x_active_mask: As for `dispatch`.
        **unused: Other arguments; only their defaults are accepted.

    Returns:
        [T, E] weighted sums in the type of `expand_x`; rows that are no tokens are unspecified.
    """
    _check(_COMBINE, expert_ids, ep_world_size, ep_rank_id, moe_expert_num, x_active_mask, unused)
    require_same_float(_COMBINE, expand_x)
    is_right = expert_scales.shape == expert_ids.shape and expert_scales.dtype is torch.float32
    require(is_right, _COMBINE, "expert_scales must be [T, k] float32")
    num_experts = moe_expert_num // ep_world_size
    ends = ep_send_counts[: num_experts * ep_world_size].long()
    counts = ends.diff(prepend=ends.new_zeros(1)).view(num_experts, ep_world_size)
    copies = _Copies(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    returning = expand_x[: int(ends[-1])][_by_expert(counts)]
    back = copies.counts.view(ep_world_size, -1).sum(1).tolist()
    rows = _exchange(returning, back, counts.sum(0).tolist(), group_ep)
    spread = expand_x.new_zeros((expert_ids.numel(), expand_x.shape[1]))
    spread[copies.places] = rows
    weighted = spread.view(*expert_ids.shape, -1).float() * expert_scales[..., None]
    return weighted.sum(1).to(expand_x.dtype)


class _Copies:
    """The copies of tokens that are sent, by expert."""

    def __init__(
        self, expert_ids: Tensor, mask: Tensor | None, num_ranks: int, num_experts: int
    ) -> None:
        flat = expert_ids.flatten().long()
        if mask is not None:
            flat = flat.masked_fill(~mask.repeat_interleave(expert_ids.shape[1]), num_experts)
        counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
        self.counts = counts
        """[experts] copies for each."""
        self.places = torch.sort(flat, stable=True).indices[: int(counts.sum())]
        """[n] place of each copy among all T * k."""
        self.sources = self.places // expert_ids.shape[1]
        """[n] its token."""


def _by_expert(counts: Tensor) -> Tensor:
    """Order that brings rows laid out as `counts` [outer, inner] says to inner first."""
    inner = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return torch.sort(inner.repeat_interleave(counts.flatten()), stable=True).indices


def _exchange(
    rows: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None, group: str
) -> Tensor:
    """All-to-all of rows; None: as many to and from each."""
    functional = torch.ops._c10d_functional
    even = [1] * len(rows) if received is None else received
    moved = functional.all_to_all_single(rows.contiguous(), even, sent or even, group)
    arrived: Tensor = functional.wait_tensor(moved)
    return arrived


def _check(
    name: str,
    expert_ids: Tensor,
    num_ranks: int,
    rank: int,
    num_experts: int,
    mask: Tensor | None,
    unused: dict[str, object],
) -> None:
    is_right = expert_ids.dim() == 2 and expert_ids.dtype is torch.int32
    require(is_right, name, "expert_ids must be [T, k] int32")
    require(0 <= rank < num_ranks, name, "ep_rank_id must be below ep_world_size")
    require(num_experts % num_ranks == 0, name, "ranks must hold as many experts each")
    is_right = mask is None or (mask.dtype is torch.bool and mask.shape == expert_ids.shape[:1])
    require(is_right, name, "x_active_mask must be [T] bool")
    for argument in ("scales", "elastic_info", "shared_expert_x", "ori_x", "y_dtype"):
        require(unused.get(argument) is None, name, "{} is not supported on CPU", argument)
    for argument in ("global_bs", "shared_expert_rank_num", "tp_world_size", "comm_quant_mode"):
        require(not unused.get(argument), name, "{} must be 0", argument)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """CPU kernels by operator name; what they do is waiting for others, so all are torch."""
    return {_DISPATCH: dispatch, _COMBINE: combine}
