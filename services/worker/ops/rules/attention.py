"""Demands of the attention family on plain caches: cache write, indexer, sparse attention."""

from types import MappingProxyType

from services.worker.ops.form import INT32, INT64, Form, Sizes
from services.worker.ops.rules.rule import Arguments, Rule, Rules

_HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
NO_WINDOW = 2**63 - 1


def attention_limits(arguments: Arguments, sizes: Sizes) -> str:
    """H one of 1, 2, 4 ... 128; K 1 to 2048, or a multiple of 1024 up to 8192."""
    if sizes["H"] not in _HEAD_COUNTS:
        return f"{sizes['H']} heads: must be one of {_HEAD_COUNTS}"
    return topk_limits(sizes["K"])


def indexer_limits(arguments: Arguments, sizes: Sizes) -> str:
    """Hi at most 64; sparse_count 1 to 2048, or a multiple of 1024 up to 8192."""
    if sizes["Hi"] > 64:
        return f"{sizes['Hi']} indexer heads: at most 64"
    return topk_limits(arguments["sparse_count"])


def topk_limits(count: int) -> str:
    """What is wrong with a number of selected positions."""
    is_wide = count <= 8192 and count % 1024 == 0
    is_right = 1 <= count <= 2048 or is_wide
    return "" if is_right else f"{count} positions: 1 to 2048, or a multiple of 1024 up to 8192"


LENGTHS = Form("R", INT32, is_flat=True)
TABLE = Form("R M", INT32, is_flat=True)
ANGLES = Form("T 1 1 64")

RULES: Rules = MappingProxyType(
    {
        "npu_kv_rmsnorm_rope_cache_v2": (
            Rule(
                tensors={
                    "kv": Form("T 1 1 576"),
                    "gamma": Form("512"),
                    "cos": ANGLES,
                    "sin": ANGLES,
                    "index": Form("T", INT64),
                    "k_cache": Form("B 128 1 64", is_flat=True),
                    "ckv_cache": Form("B 128 1 512", is_flat=True),
                },
                options={"cache_mode": ("PA",)},
            ),
        ),
        "npu_lightning_indexer": (
            Rule(
                tensors={
                    "query": Form("T Hi 128", is_flat=True),
                    "key": Form("B 128 1 128", is_flat=True),
                    "weights": Form("T Hi", is_flat=True),
                    "actual_seq_lengths_query": LENGTHS,
                    "actual_seq_lengths_key": LENGTHS,
                    "block_table": TABLE,
                },
                options={
                    "layout_query": ("TND",),
                    "layout_key": ("PA_BSND",),
                    "sparse_mode": (3,),
                    "pre_tokens": (NO_WINDOW,),
                    "next_tokens": (NO_WINDOW,),
                    "return_value": (False,),
                },
                limits=indexer_limits,
            ),
        ),
        "npu_sparse_flash_attention": (
            Rule(
                tensors={
                    "query": Form("T H 512", is_flat=True),
                    "key": Form("B 128 1 512", is_flat=True),
                    "value": Form("B 128 1 512", is_flat=True),
                    "sparse_indices": Form("T 1 K", INT32, is_flat=True),
                    "block_table": TABLE,
                    "actual_seq_lengths_query": LENGTHS,
                    "actual_seq_lengths_kv": LENGTHS,
                    "query_rope": Form("T H 64", is_flat=True),
                    "key_rope": Form("B 128 1 64", is_flat=True),
                },
                options={
                    "sparse_block_size": (1,),
                    "layout_query": ("TND",),
                    "layout_kv": ("PA_BSND",),
                    "sparse_mode": (0, 3),
                    "pre_tokens": (NO_WINDOW,),
                    "next_tokens": (NO_WINDOW,),
                    "attention_mode": (2,),
                    "return_softmax_lse": (False,),
                },
                limits=attention_limits,
            ),
        ),
    }
)
