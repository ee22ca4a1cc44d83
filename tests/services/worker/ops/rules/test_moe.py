"""Rules of sorting by expert in its three kinds."""

from typing import Any

import pytest
import torch

from services.worker.ops.device_rules import bind, find_violation
from services.worker.ops.rules.moe import RULES
from services.worker.ops.schemas import SCHEMAS


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def routing(x: torch.Tensor, **changes: Any) -> str:
    named = {
        "expert_num": 16,
        "active_expert_range": [4, 8],
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
    } | changes
    schema = torch._C.parse_schema(f"npu::{SCHEMAS['npu_moe_init_routing_v2']}")
    arguments = bind(schema, (x, meta(3, 2, dtype=torch.int32)), named)
    return find_violation("npu_moe_init_routing_v2", arguments)


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
        (routing(meta(3, 8), quant_mode=1, active_expert_range=[8, 17]), "experts 8 to 17"),
    ],
)
def test_each_trap_of_sorting_is_refused(found: str, reason: str) -> None:
    assert reason in found


def test_kinds_of_one_operator_have_names() -> None:
    for name, rules in RULES.items():
        names = [rule.case for rule in rules]
        assert len(rules) == 1 or all(names), name
        assert len(set(names)) == len(names), name
