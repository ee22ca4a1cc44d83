"""Rules of the fused exchange."""

from typing import Any

import pytest
import torch

from services.worker.ops.device_rules import bind, find_violation
from services.worker.ops.schemas import SCHEMAS


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dispatch(tokens: int = 12, width: int = 6144, k: int = 8, **changes: Any) -> str:
    named = {
        "x": meta(tokens, width),
        "expert_ids": meta(tokens, k, dtype=torch.int32),
        "group_ep": "experts",
        "ep_world_size": 16,
        "ep_rank_id": 3,
        "moe_expert_num": 256,
        "x_active_mask": meta(tokens, dtype=torch.bool),
    }
    name = "npu_moe_distribute_dispatch_v2"
    return find_violation(
        name, bind(torch._C.parse_schema(f"npu::{SCHEMAS[name]}"), (), named | changes)
    )


def combine(**changes: Any) -> str:
    named = {
        "expand_x": meta(1536, 6144),
        "expert_ids": meta(12, 8, dtype=torch.int32),
        "assist_info_for_combine": meta(1536 * 128, dtype=torch.int32),
        "ep_send_counts": meta(256, dtype=torch.int32),
        "expert_scales": meta(12, 8, dtype=torch.float32),
        "group_ep": "experts",
        "ep_world_size": 16,
        "ep_rank_id": 3,
        "moe_expert_num": 256,
        "tp_send_counts": meta(0, dtype=torch.int32),
        "x_active_mask": meta(12, dtype=torch.bool),
    }
    name = "npu_moe_distribute_combine_v2"
    return find_violation(
        name, bind(torch._C.parse_schema(f"npu::{SCHEMAS[name]}"), (), named | changes)
    )


def test_the_models_calls_pass_with_and_without_weights() -> None:
    weights = meta(12, 8, dtype=torch.float32)
    assert dispatch() == dispatch(quant_mode=2) == dispatch(expert_scales=weights) == ""
    assert combine() == combine(expand_scales=meta(1536, dtype=torch.float32)) == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (dispatch(tokens=513), "513 tokens"),
        (dispatch(width=512), "rows of 512"),
        (dispatch(k=17), "17 choices"),
        (dispatch(ep_rank_id=16), "this one 16"),
        (dispatch(ep_world_size=48), "256 experts on 48 ranks"),
        (dispatch(ep_world_size=1, ep_rank_id=0), "on 1 ranks"),
        (dispatch(group_ep=""), "group_ep"),
        (dispatch(group_ep="x" * 128), "group_ep"),
        (dispatch(quant_mode=1), "quant_mode"),
        (dispatch(global_bs=192), "global_bs"),
        (dispatch(x_active_mask=meta(12, dtype=torch.int32)), "must be bool"),
        (dispatch(x_active_mask=None), "must be one tensor"),
        (dispatch(expert_scales=meta(12, 8)), "must be fp32"),
        (combine(expand_x=meta(1536, 6144, dtype=torch.int8)), "int8 must be bf16"),
        (combine(expert_scales=meta(12, 8)), "must be fp32"),
        (combine(ep_send_counts=meta(256, dtype=torch.int64)), "must be int32"),
        (combine(expand_scales=meta(1535, dtype=torch.float32)), "expand_scales"),
        (combine(comm_quant_mode=2), "comm_quant_mode"),
    ],
)
def test_what_the_kernels_refuse_is_refused(found: str, reason: str) -> None:
    assert reason in found
