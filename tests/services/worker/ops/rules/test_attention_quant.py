"""The 8-bit forms: the model's own calls pass, and each trap is refused with its reason."""

from typing import Any

import pytest
import torch

from services.worker.ops.device_rules import bind, find_violation
from services.worker.ops.schemas import SCHEMAS

BF16, HALF, F32 = torch.bfloat16, torch.float16, torch.float32
INT8, FLOAT8, INT32 = torch.int8, torch.float8_e4m3fn, torch.int32


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(name: str, *args: object, **kwargs: object) -> str:
    return find_violation(name, bind(torch._C.parse_schema(f"npu::{SCHEMAS[name]}"), args, kwargs))


def lengths(**changes: Any) -> dict[str, Any]:
    return {
        "actual_seq_lengths_query": meta(2, dtype=INT32),
        "block_table": meta(2, 9, dtype=INT32),
        "layout_query": "TND",
    } | changes


def attention(eight: torch.dtype = INT8, **changes: Any) -> str:
    cache = changes.pop("key", meta(5, 128, 1, 656, dtype=eight))
    query = changes.pop("query", meta(3, 64, 576))
    indices = changes.pop("sparse_indices", meta(3, 1, 2048, dtype=INT32))
    modes = changes.pop("modes", (2, 2))
    named = lengths(
        actual_seq_lengths_kv=meta(2, dtype=INT32), layout_kv="PA_BSND", attention_mode=2
    )
    return call(
        "npu_kv_quant_sparse_flash_attention", query, cache, cache, indices, 0.1, *modes,
        **(named | changes),
    )  # fmt: skip


def indexer(eight: torch.dtype = INT8, heads: int = 32, **changes: Any) -> str:
    weights, scale = (HALF, HALF) if eight is INT8 else (BF16, F32)
    tensors = {
        "query": meta(3, heads, 128, dtype=eight),
        "key": meta(5, 128, 1, 128, dtype=eight),
        "weights": meta(3, heads, dtype=weights),
        "query_dequant_scale": meta(3, heads, dtype=scale),
        "key_dequant_scale": meta(5, 128, 1, dtype=scale),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
    }
    named = lengths(actual_seq_lengths_key=meta(2, dtype=INT32), layout_key="PA_BSND")
    return call("npu_quant_lightning_indexer", **(tensors | named | changes))


def quantize(x: torch.Tensor, **changes: Any) -> str:
    return call("npu_dynamic_block_quant", x, **({"dst_type": 1} | changes))


def scatter(row_type: torch.dtype, update_type: torch.dtype, width: int = 656) -> str:
    slots = meta(3, 1, dtype=torch.int64)
    rows, cache = meta(3, width, dtype=update_type), meta(9, width, dtype=row_type)
    return call("npu_scatter_nd_update_", cache, slots, rows)


@pytest.mark.parametrize("eight", [INT8, FLOAT8])
def test_the_models_own_calls_pass(eight: torch.dtype) -> None:
    assert attention(eight) == ""
    assert indexer(eight) == ""
    assert quantize(meta(3, 1, 512), dst_type=eight) == ""
    # The number that torch passes on in a type's place.
    assert quantize(meta(3, 1, 512), dst_type={INT8: 1, FLOAT8: 24}[eight]) == ""
    assert scatter(INT8, INT8) == ""
    assert scatter(HALF, HALF, width=1) == ""
    assert scatter(F32, F32, width=1) == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (attention(modes=(1, 2)), "key_quant_mode"),
        (attention(modes=(2, 0)), "value_quant_mode"),
        (attention(attention_mode=0), "attention_mode"),
        (attention(quant_scale_repo_mode=0), "quant_scale_repo_mode"),
        (attention(tile_size=64), "tile_size"),
        (attention(rope_head_dim=0), "rope_head_dim"),
        (attention(query=meta(3, 64, 512)), "query"),
        (attention(query=meta(3, 64, 576, dtype=F32)), "must be bf16 or fp16"),
        (attention(query=meta(3, 48, 576)), "48 heads"),
        (attention(key=meta(5, 128, 1, 640, dtype=INT8)), "key"),
        (attention(key=meta(5, 128, 1, 656, dtype=torch.uint8)), "uint8 must be int8"),
        (attention(sparse_indices=meta(3, 1, 8, dtype=torch.int64)), "int64 must be int32"),
        (attention(key_dequant_scale=meta(4)), "key_dequant_scale: this version passes no tensor"),
        (attention(layout_kv="BSND"), "layout_kv"),
        (indexer(heads=65), "65 indexer heads"),
        (indexer(FLOAT8, heads=12), "12 indexer heads"),
        (indexer(sparse_count=3072), "3072 positions"),
        (indexer(weights=meta(3, 32)), "must be fp16"),
        (indexer(query_dequant_scale=meta(3, 32, dtype=F32)), "must be fp16"),
        (indexer(FLOAT8, key_dequant_scale=meta(5, 128, 1, dtype=HALF)), "must be fp32"),
        (indexer(key_dequant_scale=meta(5, 128, 1, 1, dtype=HALF)), "key_dequant_scale"),
        (indexer(query=meta(3, 32, 128, dtype=FLOAT8)), "must be int8"),
        (indexer(query_quant_mode=1), "query_quant_mode"),
        (indexer(weights=meta(32, 3, dtype=HALF).t()), "not contiguous"),
        (quantize(meta(3, 512)), "must be [T 1 N]"),
        (quantize(meta(3, 1, 512, dtype=F32)), "must be bf16 or fp16"),
        (quantize(meta(3, 1, 512), dst_type=2), "no rule is written down"),
        (quantize(meta(3, 1, 512), row_block_size=2), "row_block_size"),
        (quantize(meta(3, 1, 512), min_scale=0.1), "min_scale"),
        (scatter(INT8, BF16), "bfloat16 must be int8"),
        (scatter(FLOAT8, FLOAT8), "must be bf16, fp16 or fp32"),
        (scatter(HALF, F32, width=1), "differs"),
    ],
)
def test_each_trap_is_refused_with_its_reason(found: str, reason: str) -> None:
    assert reason in found
