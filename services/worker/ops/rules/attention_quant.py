"""Demands of the attention family on 8-bit caches: quantization, indexer, sparse attention.

A2 and A3 keep int8, an A5 keeps float8; the A5's demands are torch_npu's docstrings, the others'
torch_npu's pages.
"""

from types import MappingProxyType

import torch

from services.worker.ops.form import FLOAT8, HALF, INT8, INT32, NARROW, SCALE, Form, Kind, Sizes
from services.worker.ops.rules.attention import LENGTHS, NO_WINDOW, TABLE, attention_limits
from services.worker.ops.rules.rule import Arguments, Rule, Rules
from services.worker.ops.scalar_types import to_dtype

_INT8_CASE = "int8: A2, A3"
_FLOAT8_CASE = "fp8: A5"
_A5_HEAD_COUNTS = (8, 16, 24, 32, 64)


def _gives_int8(arguments: Arguments) -> bool:
    return to_dtype(arguments["dst_type"]) is torch.int8


def _gives_float8(arguments: Arguments) -> bool:
    return to_dtype(arguments["dst_type"]) is torch.float8_e4m3fn


def _reads_float8(arguments: Arguments) -> bool:
    return bool(arguments["key"].dtype is torch.float8_e4m3fn)


def _indexer_limits(arguments: Arguments, sizes: Sizes) -> str:
    """Hi at most 64; sparse_count 1 to 2048."""
    # torch_npu's page names 64 heads only, its docstring at most 64: GLM-5.2 has 32.
    if sizes["Hi"] > 64:
        return f"{sizes['Hi']} indexer heads: at most 64"
    count = arguments["sparse_count"]
    return "" if 1 <= count <= 2048 else f"{count} positions: 1 to 2048"


def _a5_indexer_limits(arguments: Arguments, sizes: Sizes) -> str:
    """Hi one of 8, 16, 24, 32, 64; sparse_count 1 to 2048."""
    if sizes["Hi"] not in _A5_HEAD_COUNTS:
        return f"{sizes['Hi']} indexer heads: must be one of {_A5_HEAD_COUNTS}"
    return _indexer_limits(arguments, sizes)


_QUANT_OPTIONS = MappingProxyType(
    {
        "min_scale": (0.0,),
        "round_mode": ("rint",),
        "row_block_size": (1,),
        "col_block_size": (128,),
        "dst_type_max": (0.0,),
    }
)
_INDEXER_OPTIONS = MappingProxyType(
    {
        "query_quant_mode": (0,),
        "key_quant_mode": (0,),
        "layout_query": ("TND",),
        "layout_key": ("PA_BSND",),
        "sparse_mode": (3,),
        "pre_tokens": (NO_WINDOW,),
        "next_tokens": (NO_WINDOW,),
        "query_dtype": (None,),
        "key_dtype": (None,),
    }
)
_ATTENTION_OPTIONS = MappingProxyType(
    {
        "key_quant_mode": (2,),
        "value_quant_mode": (2,),
        "sparse_block_size": (1,),
        "layout_query": ("TND",),
        "layout_kv": ("PA_BSND",),
        "sparse_mode": (0, 3),
        "pre_tokens": (NO_WINDOW,),
        "next_tokens": (NO_WINDOW,),
        "attention_mode": (2,),
        "quant_scale_repo_mode": (1,),
        "tile_size": (128,),
        "rope_head_dim": (64,),
        "key_dtype": (None,),
        "value_dtype": (None,),
    }
)


def _indexer_forms(eight: Kind, weights: Kind, scale: Kind) -> dict[str, Form]:
    return {
        "query": Form("T Hi 128", eight, is_flat=True),
        "key": Form("B 128 1 128", eight, is_flat=True),
        "weights": Form("T Hi", weights, is_flat=True),
        "query_dequant_scale": Form("T Hi", scale, is_flat=True),
        "key_dequant_scale": Form("B 128 1", scale, is_flat=True),
        "actual_seq_lengths_query": LENGTHS,
        "actual_seq_lengths_key": LENGTHS,
        "block_table": TABLE,
    }


def _attention_forms(eight: Kind) -> dict[str, Form]:
    packed = Form("B 128 1 656", eight, is_flat=True)
    return {
        "query": Form("T H 576", is_flat=True),
        "key": packed,
        "value": packed,
        "sparse_indices": Form("T 1 K", INT32, is_flat=True),
        "block_table": TABLE,
        "actual_seq_lengths_query": LENGTHS,
        "actual_seq_lengths_kv": LENGTHS,
    }


RULES: Rules = MappingProxyType(
    {
        "npu_dynamic_block_quant": tuple(
            Rule(tensors={"x": Form("T 1 N")}, options=_QUANT_OPTIONS, case=case, applies=applies)
            for case, applies in ((_INT8_CASE, _gives_int8), (_FLOAT8_CASE, _gives_float8))
        ),
        "npu_quant_lightning_indexer": (
            Rule(
                tensors=_indexer_forms(FLOAT8, NARROW, SCALE),
                options=_INDEXER_OPTIONS,
                limits=_a5_indexer_limits,
                case=_FLOAT8_CASE,
                applies=_reads_float8,
            ),
            Rule(
                tensors=_indexer_forms(INT8, HALF, HALF),
                options=_INDEXER_OPTIONS,
                limits=_indexer_limits,
                case=_INT8_CASE,
            ),
        ),
        "npu_kv_quant_sparse_flash_attention": (
            Rule(
                tensors=_attention_forms(FLOAT8),
                options=_ATTENTION_OPTIONS,
                limits=attention_limits,
                case=_FLOAT8_CASE,
                applies=_reads_float8,
            ),
            Rule(
                tensors=_attention_forms(INT8),
                options=_ATTENTION_OPTIONS,
                limits=attention_limits,
                case=_INT8_CASE,
            ),
        ),
    }
)
