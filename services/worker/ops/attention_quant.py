"""Attention over the packed 8-bit latent cache.

A cached row is 656 bytes: 512 latents in eight bits (int8, float8 on A5), the rotated key as 64
bfloat16, and 4 float32 scales, one for each 128 latents. A row is brought back to the query's type
before it is used, as the device does. The rotated key is bfloat16 in float32 runs too: the row has
no room for more, and an 8-bit cache is no place to look for float32's last bits.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.attention import attend_rows, chosen_positions, require_modes
from services.worker.ops.checks import (
    FLOATS,
    require,
    require_contiguous,
    require_int32,
    require_step,
)
from services.worker.ops.native import Native
from services.worker.ops.paged import RowTile, row_tiles

_NAME = "npu_kv_quant_sparse_flash_attention"
_BLOCK = 128
_LATENT = 512
_ROPE = 64
_SCALE_TILE = 128
_ROPE_BYTES = 2 * _ROPE
_SCALE_BYTES = 4 * _LATENT // _SCALE_TILE
PACKED_BYTES = _LATENT + _ROPE_BYTES + _SCALE_BYTES
_PER_TILE = 2
_COMBINED = 1
_CAUSAL = 3
_ROW_TYPES = (torch.int8, torch.float8_e4m3fn)


def kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = _CAUSAL,
    attention_mode: int = 0,
    **packing: object,
) -> Tensor:
    """Attend to the selected positions.

    Args:
        query: [T, H, 576] queries in latent space, rotated queries behind them.
        key: [B, 128, 1, 656] packed cache.
        value: The same cache.
        sparse_indices: [T, 1, K] int32 positions, valid ones first, then -1.
        scale_value: Softmax scale.
        key_quant_mode: 2 only, a scale per tile.
        value_quant_mode: 2 only.
        block_table: [R, max_blocks] int32.
        actual_seq_lengths_query: [R] int32 inclusive prefix sum of tokens per sequence.
        actual_seq_lengths_kv: [R] int32 KV lengths.
        sparse_block_size: 1 only.
        layout_query: "TND" only.
        layout_kv: "PA_BSND" only.
        sparse_mode: 3 (right-down causal) or 0 (every key of the sequence).
        attention_mode: 2 only (absorbed MLA).
        **packing: What the row is made of, and windows; only this packing is accepted.

    Returns:
        [T, H, 512] values in latent space.
    """
    _check(query, key, value, sparse_indices)
    _check_packing(key_quant_mode, value_quant_mode, packing)
    require_step(_NAME, actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
    require_modes(_NAME, layout_query, layout_kv, sparse_mode, attention_mode, sparse_block_size)
    output = query.new_zeros((*query.shape[:2], _LATENT))
    tiles = row_tiles(
        actual_seq_lengths_query, actual_seq_lengths_kv, block_table, _BLOCK,
        is_causal=sparse_mode == _CAUSAL,
    )  # fmt: skip
    for tile in tiles:
        rows = slice(tile.first, tile.last)
        is_chosen = chosen_positions(sparse_indices[rows, 0], tile.limits, tile.num_keys)
        latent, rope = _unpack(key, tile, query.dtype)
        nope, rotated = query[rows].float().split_with_sizes([_LATENT, _ROPE], 2)
        output[rows] = attend_rows(nope, rotated, latent, rope, is_chosen, scale_value).to(
            query.dtype
        )
    return output


def _unpack(cache: Tensor, tile: RowTile, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tile's rows in position order: latents [num_keys, 512] and rotated keys [num_keys, 64].

    float32, with the precision of `dtype`.
    """
    rows = cache[tile.blocks].view(torch.int8).reshape(-1, PACKED_BYTES)[: tile.num_keys]
    sizes = [_LATENT, _ROPE_BYTES, _SCALE_BYTES]
    eights, rope, scales = (part.contiguous() for part in rows.split_with_sizes(sizes, 1))
    tiles = eights.view(cache.dtype).float().view(-1, _LATENT // _SCALE_TILE, _SCALE_TILE)
    latent = (tiles * scales.view(torch.float32)[..., None]).view(-1, _LATENT)
    return latent.to(dtype).float(), rope.view(torch.bfloat16).float()


def _native_attention(
    native: Native,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = _CAUSAL,
    attention_mode: int = 0,
    **packing: object,
) -> Tensor:
    if key.dtype is torch.float8_e4m3fn:  # rows of an A5, here for tests of their layout
        return kv_quant_sparse_flash_attention(
            query, key, value, sparse_indices, scale_value, key_quant_mode, value_quant_mode,
            block_table=block_table, actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_kv=actual_seq_lengths_kv, sparse_block_size=sparse_block_size,
            layout_query=layout_query, layout_kv=layout_kv, sparse_mode=sparse_mode,
            attention_mode=attention_mode, **packing,
        )  # fmt: skip
    _check(query, key, value, sparse_indices)
    _check_packing(key_quant_mode, value_quant_mode, packing)
    require_step(_NAME, actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
    require_modes(_NAME, layout_query, layout_kv, sparse_mode, attention_mode, sparse_block_size)
    tokens, heads, _ = query.shape
    output = query.new_empty(tokens, heads, _LATENT)
    native.call(
        "packed_attention", query.dtype,
        (
            tokens, heads, block_table.shape[0], block_table.shape[1], key.shape[0],
            sparse_indices.shape[2], int(sparse_mode == _CAUSAL), scale_value,
        ),
        query, key, sparse_indices, actual_seq_lengths_query, actual_seq_lengths_kv, block_table,
        output,
    )  # fmt: skip
    return output


def _check(query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor) -> None:
    is_wide = query.dim() == 3 and query.shape[-1] == _LATENT + _ROPE
    require(is_wide, _NAME, "query must be [T, H, 576]")
    require(query.dtype in FLOATS, _NAME, "query must be bfloat16 or float32")
    is_paged = key.dim() == 4 and key.shape[1:] == (_BLOCK, 1, PACKED_BYTES)
    require(is_paged, _NAME, "key must be [B, 128, 1, 656]")
    require(key.dtype in _ROW_TYPES, _NAME, "key must be int8 or float8_e4m3fn")
    is_same = value.data_ptr() == key.data_ptr() and value.shape == key.shape
    require(is_same, _NAME, "value must be the packed cache that key is")
    rows = (query.shape[0], 1)
    require(sparse_indices.shape[:2] == rows, _NAME, "sparse_indices must be [T, 1, K]")
    require_int32(_NAME, sparse_indices)
    require_contiguous(_NAME, query, key)


def _check_packing(key_mode: int, value_mode: int, packing: dict[str, object]) -> None:
    is_per_tile = key_mode == value_mode == _PER_TILE
    require(is_per_tile, _NAME, "key_quant_mode and value_quant_mode must be 2")
    only = {"quant_scale_repo_mode": _COMBINED, "tile_size": _SCALE_TILE, "rope_head_dim": _ROPE}
    for argument, expected in only.items():
        found = packing.get(argument, expected)
        require(found == expected, _NAME, f"{argument} {{}} must be {expected}", found)
    for argument in ("key_dequant_scale", "value_dequant_scale", "key_dtype", "value_dtype"):
        require(packing.get(argument) is None, _NAME, "{} is not supported", argument)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {_NAME: kv_quant_sparse_flash_attention}
    return {_NAME: functools.partial(_native_attention, native)}
