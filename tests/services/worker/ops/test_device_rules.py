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
from services.worker.ops.rules.dense import takes_batchmatmul
from services.worker.ops.schemas import SCHEMAS
from shared.errors import ConfigError

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def schema(name: str) -> Any:
    return torch._C.parse_schema(f"npu::{SCHEMAS[name]}")


def call(name: str, *args: object, **kwargs: object) -> str:
    return find_violation(name, bind(schema(name), args, kwargs))


def lengths(count: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "actual_seq_lengths_query": meta(count, dtype=torch.int32),
        "block_table": meta(count, 9, dtype=torch.int32),
        "layout_query": "TND",
    } | changes


def attention(heads: int = 64, count: int = 2048, **changes: Any) -> str:
    cache, rope = meta(5, 128, 1, 512), meta(5, 128, 1, 64)
    query = changes.pop("query", meta(3, heads, 512))
    indices = changes.pop("sparse_indices", meta(3, 1, count, dtype=torch.int32))
    named = lengths(
        actual_seq_lengths_kv=meta(2, dtype=torch.int32),
        query_rope=meta(3, heads, 64),
        key_rope=rope,
        layout_kv="PA_BSND",
        attention_mode=2,
    )
    return call(
        "npu_sparse_flash_attention", query, cache, cache, indices, 0.1, **(named | changes)
    )


def indexer(heads: int = 32, **changes: Any) -> str:
    named = lengths(actual_seq_lengths_key=meta(2, dtype=torch.int32), layout_key="PA_BSND")
    query, key = meta(3, heads, 128), meta(5, 128, 1, 128)
    weights = changes.pop("weights", meta(3, heads))
    return call("npu_lightning_indexer", query, key, weights, **(named | changes))


def kv_write(**changes: Any) -> str:
    named = {
        "kv": meta(3, 1, 1, 576),
        "gamma": meta(512),
        "cos": meta(3, 1, 1, 64),
        "sin": meta(3, 1, 1, 64),
        "index": meta(3, dtype=torch.int64),
        "k_cache": meta(5, 128, 1, 64),
        "ckv_cache": meta(5, 128, 1, 512),
        "cache_mode": "PA",
    }
    return call("npu_kv_rmsnorm_rope_cache_v2", **(named | changes))


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


@pytest.mark.parametrize(
    "make_call", [attention, indexer, kv_write, gating, routing, grouped], ids=lambda f: f.__name__
)
def test_right_calls_pass(make_call: Any) -> None:
    assert make_call() == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (attention(attention_mode=0), "attention_mode: 0 must be one of [2]"),
        (attention(layout_query="BSND"), "layout_query"),
        (attention(layout_kv="TND"), "layout_kv"),
        (attention(heads=48), "48 heads"),
        (attention(count=2500), "2500 positions"),
        (attention(query=meta(3, 64, 512, dtype=torch.float32)), "float32 must be bf16"),
        (attention(query=meta(64, 3, 512).transpose(0, 1)), "not contiguous"),
        (attention(sparse_indices=meta(3, 1, 8, dtype=torch.int64)), "int64 must be int32"),
        (attention(block_table=meta(3, 9, dtype=torch.int32)), "must be [R]"),
        (attention(actual_seq_lengths_kv=None), "must be one tensor"),
        (attention(return_softmax_lse=True), "return_softmax_lse"),
        (attention(sinks=meta(64)), "sinks: this version passes no tensor here"),
        (indexer(heads=65), "65 indexer heads"),
        (indexer(sparse_count=9216), "9216 positions"),
        (indexer(weights=meta(32, 3).t()), "not contiguous"),
        (indexer(layout_key="BSND"), "layout_key"),
        (kv_write(index=meta(3, dtype=torch.int32)), "int32 must be int64"),
        (kv_write(cache_mode="Norm"), "cache_mode: 'Norm' must be one of ['PA']"),
        (kv_write(k_cache=meta(5, 128, 1, 512), ckv_cache=meta(5, 128, 1, 64)), "k_cache"),
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


def test_wide_positions_are_allowed_in_steps_of_1024() -> None:
    assert [indexer(sparse_count=count) for count in (1, 2048, 3072, 8192)] == [""] * 4


def test_the_small_operators_hold_their_shapes() -> None:
    matmul = {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}
    weight = meta(4, 512, 256)
    assert call("npu_transpose_batchmatmul", meta(3, 4, 512), weight, **matmul) == ""
    assert "perm_x1" in call("npu_transpose_batchmatmul", meta(3, 4, 512), weight)
    indices = meta(6, dtype=torch.int32)
    assert call("npu_moe_token_unpermute", meta(6, 8), indices, meta(3, 2)) == ""
    assert "each token and choice" in call(
        "npu_moe_token_unpermute", meta(6, 8), indices, meta(2, 2)
    )
    assert call("npu_swiglu", meta(3, 8)) == ""
    assert "two equal halves" in call("npu_swiglu", meta(3, 7))
    assert "gamma" in call("npu_rms_norm", meta(3, 8), meta(9))
    assert "updates" in call(
        "npu_scatter_nd_update_", meta(9, 8), meta(2, 1, dtype=torch.int64), meta(3, 8)
    )


@pytest.mark.parametrize(
    ("heads", "inner", "outer"),
    [(64, 192, 512), (4, 512, 64), (128, 512, 256)],  # GLM-5.2's query side, narrow, too long rows
)
def test_sizes_that_the_per_head_product_refuses(heads: int, inner: int, outer: int) -> None:
    assert not takes_batchmatmul(heads, inner, outer)
    arguments = {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}
    x, weight = meta(3, heads, inner), meta(heads, inner, outer)
    assert "steps of 128" in call("npu_transpose_batchmatmul", x, weight, **arguments)


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
