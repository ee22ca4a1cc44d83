"""Shape functions of the fused exchange of experts' tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

_INFO_PER_ROW = 128


def _dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_scales: Tensor | None = None,
    quant_mode: int = 0,
    **unused: object,
) -> tuple[Tensor, ...]:
    tokens, k = expert_ids.shape
    num_experts = moe_expert_num // ep_world_size
    room = tokens * ep_world_size * min(num_experts, k)
    sums = num_experts * ep_world_size
    if expert_scales is not None:
        sums += 2 * tokens * ep_world_size * k * (ep_world_size // 8)
    return (
        x.new_empty((room, x.shape[1]), dtype=torch.int8 if quant_mode else x.dtype),
        x.new_empty(room, dtype=torch.float32),
        x.new_empty(max(tokens * k, _INFO_PER_ROW * room), dtype=torch.int32),
        x.new_empty(num_experts, dtype=torch.int64),
        x.new_empty(sums, dtype=torch.int32),
        x.new_empty(0, dtype=torch.int32),
        x.new_empty(room if expert_scales is not None else 0, dtype=torch.float32),
    )


def _combine(expand_x: Tensor, expert_ids: Tensor, *rest: object, **unused: object) -> Tensor:
    return expand_x.new_empty((expert_ids.shape[0], expand_x.shape[1]))


def kernels() -> dict[str, Callable[..., object]]:
    """Shape function of each operator."""
    return {
        "npu_moe_distribute_combine_v2": _combine,
        "npu_moe_distribute_dispatch_v2": _dispatch,
    }
