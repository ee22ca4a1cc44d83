"""The rules of attention on plain caches: each trap is refused with its reason."""

from typing import Any

import pytest
import torch

from services.worker.ops.device_rules import bind, find_violation
from services.worker.ops.schemas import SCHEMAS

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(name: str, *args: object, **kwargs: object) -> str:
    return find_violation(name, bind(torch._C.parse_schema(f"npu::{SCHEMAS[name]}"), args, kwargs))


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


@pytest.mark.parametrize("make_call", [attention, indexer, kv_write], ids=lambda f: f.__name__)
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
    ],
)
def test_each_trap_is_refused_with_its_reason(found: str, reason: str) -> None:
    assert reason in found


def test_wide_positions_are_allowed_in_steps_of_1024() -> None:
    assert [indexer(sparse_count=count) for count in (1, 2048, 3072, 8192)] == [""] * 4
