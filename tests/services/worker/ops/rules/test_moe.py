"""Rules of the expert family: choice, sorting in its three kinds, plain products, sums."""

from typing import Any

import pytest
import torch

from services.worker.ops.device_rules import bind, find_violation
from services.worker.ops.rules.moe import RULES
from services.worker.ops.schemas import SCHEMAS


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(name: str, *args: object, **kwargs: object) -> str:
    return find_violation(name, bind(torch._C.parse_schema(f"npu::{SCHEMAS[name]}"), args, kwargs))


def gating(experts: int = 256, k: int = 8, **changes: Any) -> str:
    x, bias = meta(3, experts, dtype=torch.float32), meta(experts, dtype=torch.float32)
    named = {"bias": bias, "group_select_mode": 1, "norm_type": 1}
    return call("npu_moe_gating_top_k", x, k, **(named | changes))


def routing(x: torch.Tensor, **changes: Any) -> str:
    named = {
        "expert_num": 16,
        "active_expert_range": [4, 8],
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
    }
    experts = changes.pop("expert_idx", meta(3, 2, dtype=torch.int32))
    return call("npu_moe_init_routing_v2", x, experts, **(named | changes))


def grouped(groups: int = 4, **changes: Any) -> str:
    named = {
        "group_list": meta(groups, dtype=torch.int64),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
    }
    return call("npu_grouped_matmul", [meta(6, 8)], [meta(groups, 8, 4)], **(named | changes))


def unpermute(tokens: int = 3, **changes: Any) -> str:
    indices = changes.pop("sorted_indices", meta(6, dtype=torch.int32))
    return call("npu_moe_token_unpermute", meta(6, 8), indices, meta(tokens, 2), **changes)


def test_right_calls_pass() -> None:
    assert gating() == grouped() == unpermute() == ""


def test_the_three_kinds_of_rows_pass() -> None:
    scale = meta(3, dtype=torch.float32)
    assert routing(meta(3, 8)) == ""
    assert routing(meta(3, 8), quant_mode=1) == ""
    assert routing(meta(3, 8, dtype=torch.float32), quant_mode=1) == ""
    assert routing(meta(3, 8, dtype=torch.int8), scale=scale) == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (routing(meta(3, 8, dtype=torch.int8), quant_mode=1), "int8 must be bf16"),
        (routing(meta(3, 8, dtype=torch.int8)), "int8 must be bf16"),
        (routing(meta(3, 8), scale=meta(3, dtype=torch.float32)), "bfloat16 must be int8"),
        (routing(meta(3, 8), quant_mode=0), "quant_mode"),
        (
            routing(meta(3, 8, dtype=torch.int8), scale=meta(4, dtype=torch.float32)),
            "scale: (4,) must be [T]",
        ),
        (routing(meta(3, 8), quant_mode=1, expert_tokens_num_type=0), "expert_tokens_num_type"),
        (routing(meta(3, 8), quant_mode=1, active_expert_range=[8, 17]), "experts 8 to 17 of 16"),
        (routing(meta(3, 8), expert_idx=meta(3, 2, dtype=torch.int64)), "int64 must be int32"),
        (gating(bias=meta(256)), "differs"),
        (gating(renorm=1), "renorm"),
        (gating(norm_type=0), "norm_type"),
        (gating(k=9, k_group=1, group_count=32), "must fit in the chosen groups"),
        (gating(experts=16, group_count=8), "above 2 per group"),
        (grouped(groups=1), "counts need two or more"),
        (grouped(group_list=meta(4, dtype=torch.int32)), "int32 must be int64"),
        (grouped(bias=[meta(4)]), "bias: this version passes no tensor here"),
        (grouped(group_list_type=0), "group_list_type"),
        (unpermute(tokens=2), "one index for each token and choice"),
        (unpermute(padded_mode=True), "padded_mode"),
    ],
)
def test_each_trap_is_refused_with_its_reason(found: str, reason: str) -> None:
    assert reason in found


def test_kinds_of_one_operator_have_names() -> None:
    for name, rules in RULES.items():
        names = [rule.case for rule in rules]
        assert len(rules) == 1 or all(names), name
        assert len(set(names)) == len(names), name
