"""The rules cover every operator, take the model's own calls and refuse every trap we know of."""

from typing import Any

import pytest
import torch

from services.worker.ops.device_rules import (
    RULES,
    DeviceGuard,
    bind,
    find_violation,
)
from services.worker.ops.schemas import SCHEMAS
from shared.errors import ConfigError

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def schema(name: str) -> Any:
    return torch._C.parse_schema(f"npu::{SCHEMAS[name]}")


def call(name: str, *args: object, **kwargs: object) -> str:
    return find_violation(name, bind(schema(name), args, kwargs))


def gating(experts: int = 256, k: int = 8, **changes: Any) -> str:
    x, bias = meta(3, experts, dtype=torch.float32), meta(experts, dtype=torch.float32)
    named = {"bias": bias, "group_select_mode": 1, "norm_type": 1}
    return call("npu_moe_gating_top_k", x, k, **(named | changes))


def routing(**changes: Any) -> str:
    named = {
        "expert_num": 16,
        "active_expert_range": [4, 8],
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
    }
    experts = changes.pop("expert_idx", meta(3, 2, dtype=torch.int32))
    return call("npu_moe_init_routing_v2", meta(3, 8), experts, **(named | changes))


def grouped(groups: int = 4, **changes: Any) -> str:
    named = {
        "group_list": meta(groups, dtype=torch.int64),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
    }
    return call("npu_grouped_matmul", [meta(6, 8)], [meta(groups, 8, 4)], **(named | changes))


def test_every_operator_has_a_rule_over_its_own_arguments() -> None:
    assert RULES.keys() == SCHEMAS.keys()
    for name, rules in RULES.items():
        arguments = {argument.name for argument in schema(name).arguments}
        for rule in rules:
            assert rule.tensors.keys() | rule.options.keys() <= arguments, name


@pytest.mark.parametrize("make_call", [gating, routing, grouped], ids=lambda f: f.__name__)
def test_right_calls_pass(make_call: Any) -> None:
    assert make_call() == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (gating(bias=meta(256)), "differs"),
        (gating(renorm=1), "renorm"),
        (gating(norm_type=0), "norm_type"),
        (gating(k=9, k_group=1, group_count=32), "must fit in the chosen groups"),
        (gating(experts=16, group_count=8), "above 2 per group"),
        (routing(expert_idx=meta(3, 2, dtype=torch.int64)), "int64 must be int32"),
        (routing(active_expert_range=[8, 17]), "experts 8 to 17 of 16"),
        (routing(expert_tokens_num_type=0), "expert_tokens_num_type"),
        (grouped(groups=1), "counts need two or more"),
        (grouped(group_list=meta(4, dtype=torch.int32)), "int32 must be int64"),
        (grouped(bias=[meta(4)]), "bias: this version passes no tensor here"),
        (grouped(group_list_type=0), "group_list_type"),
    ],
)
def test_each_trap_is_refused_with_its_reason(found: str, reason: str) -> None:
    assert reason in found


def test_an_operator_without_a_rule_is_refused() -> None:
    assert "no rule is written down for this operator" in find_violation("npu_new", {})


def test_the_guard_names_operator_argument_and_reason() -> None:
    x = torch.zeros((2, 6), dtype=BF16)
    gamma = torch.ones(6)
    with DeviceGuard(), pytest.raises(ConfigError, match=r"npu_rms_norm: gamma: torch\.float32"):
        torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)


def test_the_guard_lets_right_calls_through() -> None:
    x = torch.zeros((2, 6), dtype=BF16)
    with DeviceGuard():
        normed, _ = torch.ops.npu.npu_rms_norm(x, torch.ones(6, dtype=BF16), 1e-5)
    assert normed.count_nonzero() == 0
