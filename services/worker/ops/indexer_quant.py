"""Selection of positions on 8-bit indexer keys.

``score[t, s] = key_scale[s] * sum_h factor[t, h] * relu(query[t, h] . key[s])``, a head's factor
being its weight times its query's scale.

On int8 the numbers are rounded where an A2 or A3 rounds them, since a selection is compared with
theirs position by position: the product, over 1024, to float16, and the factor to float16; the sum
over heads is float32. On float8 (A5) everything behind the product is float32: that device's
roundings are not documented.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_contiguous, require_step
from services.worker.ops.indexer import NO_POSITION, rank_positions
from services.worker.ops.native import Native
from services.worker.ops.paged import RowTile, gather_rows, row_tiles

_NAME = "npu_quant_lightning_indexer"
_HEAD = 128
_BLOCK = 128
_MAX_HEADS = 64
_MAX_COUNT = 2048
_CAUSAL = 3
_PER_TOKEN_HEAD = 0
_PRODUCT_SHIFT = 2.0**-10
# Keys -> weights and scales.
_TYPES = {
    torch.int8: ((torch.float16,), torch.float16),
    torch.float8_e4m3fn: ((torch.bfloat16, torch.float16), torch.float32),
}


def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = _CAUSAL,
    **unused: object,
) -> Tensor:
    """Select positions for each token.

    Args:
        query: [T, Hi, Di] int8 (float8_e4m3fn on A5).
        key: [B, 128, 1, Di] paged keys of the same type.
        weights: [T, Hi] float16 head weights (bfloat16 on A5).
        query_dequant_scale: [T, Hi] float16 (float32 on A5).
        key_dequant_scale: [B, 128, 1] float16 (float32 on A5).
        query_quant_mode: 0 only, a scale per token and head.
        key_quant_mode: 0 only.
        actual_seq_lengths_query: [R] int32 inclusive prefix sum of tokens per sequence.
        actual_seq_lengths_key: [R] int32 KV lengths.
        block_table: [R, max_blocks] int32.
        layout_query: "TND" only.
        layout_key: "PA_BSND" only.
        sparse_count: K, the most positions a row selects, at most 2048.
        sparse_mode: 3 only, right-down causal.
        **unused: Windows and further types; only their defaults are accepted.

    Returns:
        [T, 1, K] int32 positions, valid ones first and -1 after them.
    """
    _check(query, key, weights, query_dequant_scale, key_dequant_scale)
    _check_modes(query_quant_mode, key_quant_mode, sparse_count, sparse_mode, unused)
    _check_layouts(layout_query, layout_key)
    require_step(_NAME, actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    positions = torch.full((query.shape[0], 1, sparse_count), NO_POSITION, dtype=torch.int32)
    tiles = row_tiles(
        actual_seq_lengths_query, actual_seq_lengths_key, block_table, _BLOCK, is_causal=True
    )
    for tile in tiles:
        rows = slice(tile.first, tile.last)
        score = functools.partial(
            _score, query[rows], key, weights[rows], query_dequant_scale[rows], key_dequant_scale,
            tile,
        )  # fmt: skip
        selected = rank_positions(score, tile, sparse_count)
        positions[rows, 0, : selected.shape[1]] = selected
    return positions


def _score(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_scale: Tensor,
    key_scale: Tensor,
    tile: RowTile,
) -> Tensor:
    """Scores [rows, num_keys] of one tile, float32."""
    # A sum of 128 products of int8 is below 2^24: float32 holds it.
    products = torch.relu(torch.einsum("thd,sd->ths", query.float(), gather_rows(key, tile)))
    factors = weights.float() * query_scale.float()
    if query.dtype is torch.int8:
        products = (products * _PRODUCT_SHIFT).half().float()
        factors = factors.half().float()
    scores = torch.einsum("th,ths->ts", factors, products)
    return scores * gather_rows(key_scale.unsqueeze(-1), tile)[:, 0]


def _native_indexer(
    native: Native,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = _CAUSAL,
    **unused: object,
) -> Tensor:
    if query.dtype is torch.float8_e4m3fn:  # keys of an A5, here for tests of their layout
        return quant_lightning_indexer(
            query, key, weights, query_dequant_scale, key_dequant_scale, query_quant_mode,
            key_quant_mode, actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_key=actual_seq_lengths_key, block_table=block_table,
            layout_query=layout_query, layout_key=layout_key, sparse_count=sparse_count,
            sparse_mode=sparse_mode, **unused,
        )  # fmt: skip
    _check(query, key, weights, query_dequant_scale, key_dequant_scale)
    _check_modes(query_quant_mode, key_quant_mode, sparse_count, sparse_mode, unused)
    _check_layouts(layout_query, layout_key)
    require_step(_NAME, actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    tokens, heads, _ = query.shape
    positions = block_table.new_empty(tokens, 1, sparse_count)
    native.call(
        "quant_lightning_indexer", torch.float32,
        (tokens, heads, block_table.shape[0], block_table.shape[1], key.shape[0], sparse_count),
        query, key, weights, query_dequant_scale, key_dequant_scale, actual_seq_lengths_query,
        actual_seq_lengths_key, block_table, positions,
    )  # fmt: skip
    return positions


def _check(
    query: Tensor, key: Tensor, weights: Tensor, query_scale: Tensor, key_scale: Tensor
) -> None:
    require(query.dim() == 3, _NAME, "query must be [T, Hi, Di]")
    is_paged = key.dim() == 4 and key.shape[1:3] == (_BLOCK, 1)
    require(is_paged, _NAME, "key must be [B, 128, 1, Di]")
    require(query.shape[-1] == _HEAD and key.shape[-1] == _HEAD, _NAME, "heads must be 128 wide")
    require(query.shape[1] <= _MAX_HEADS, _NAME, "{} heads must be at most 64", query.shape[1])
    require(weights.shape == query.shape[:2], _NAME, "weights must be [T, Hi]")
    require(query_scale.shape == query.shape[:2], _NAME, "query_dequant_scale must be [T, Hi]")
    require(key_scale.shape == key.shape[:3], _NAME, "key_dequant_scale must be [B, 128, 1]")
    is_eight = query.dtype in _TYPES and key.dtype is query.dtype
    require(is_eight, _NAME, "query and key must both be int8 or both float8_e4m3fn")
    weight_types, scale_type = _TYPES[query.dtype]
    require(weights.dtype in weight_types, _NAME, "weights must not be {} here", weights.dtype)
    is_scale = query_scale.dtype is scale_type and key_scale.dtype is scale_type
    require(is_scale, _NAME, "both scales must be {} here", scale_type)
    require_contiguous(_NAME, query, key, weights, query_scale, key_scale)


def _check_modes(
    query_mode: int, key_mode: int, count: int, sparse_mode: int, unused: dict[str, object]
) -> None:
    is_per_head = query_mode == key_mode == _PER_TOKEN_HEAD
    require(is_per_head, _NAME, "query_quant_mode and key_quant_mode must be 0")
    is_narrow = 1 <= count <= _MAX_COUNT
    require(is_narrow, _NAME, "sparse_count {} must be 1 to 2048", count)
    require(sparse_mode == _CAUSAL, _NAME, "sparse_mode {} must be 3", sparse_mode)
    for argument in ("query_dtype", "key_dtype"):
        require(unused.get(argument) is None, _NAME, "{} is not supported", argument)


def _check_layouts(layout_query: str, layout_key: str) -> None:
    require(layout_query == "TND", _NAME, "layout_query {!r} must be 'TND'", layout_query)
    require(layout_key == "PA_BSND", _NAME, "layout_key {!r} must be 'PA_BSND'", layout_key)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {_NAME: quant_lightning_indexer}
    return {_NAME: functools.partial(_native_indexer, native)}
