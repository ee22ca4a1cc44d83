"""Selection of the positions that a token attends to (the lightning indexer).

``score[t, s] = sum_h weights[t, h] * relu(query[t, h] . key[s])`` over the causal prefix; the
`sparse_count` best positions win. While the prefix fits in `sparse_count` every position is
selected and nothing is scored. Ties go to the lower position, so that runs repeat.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import (
    require,
    require_contiguous,
    require_same_float,
    require_step,
)
from services.worker.ops.native import Native
from services.worker.ops.paged import RowTile, gather_rows, row_tiles

NO_POSITION = -1
_NAME = "npu_lightning_indexer"
_HEAD = 128
_BLOCK = 128
_CAUSAL = 3


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = _CAUSAL,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Select positions for each token.

    Args:
        query: [T, Hi, Di].
        key: [B, 128, 1, Di] paged indexer keys.
        weights: [T, Hi] head weights.
        actual_seq_lengths_query: [R] int32 inclusive prefix sum of tokens per sequence.
        actual_seq_lengths_key: [R] int32 KV lengths.
        block_table: [R, max_blocks] int32.
        layout_query: "TND" only.
        layout_key: "PA_BSND" only.
        sparse_count: K, the most positions a row selects.
        sparse_mode: 3 only, right-down causal.
        **unused: Window and value arguments; only their defaults are accepted.

    Returns:
        [T, 1, K] int32 positions inside the row's own sequence, valid ones first and -1 after
        them (a device may order the valid ones in any way), and an empty tensor.
    """
    _check(query, key, weights, layout_query, layout_key, sparse_mode, unused)
    require_step(_NAME, actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    positions = torch.full((query.shape[0], 1, sparse_count), NO_POSITION, dtype=torch.int32)
    tiles = row_tiles(
        actual_seq_lengths_query, actual_seq_lengths_key, block_table, key.shape[1], is_causal=True
    )
    for tile in tiles:
        rows = slice(tile.first, tile.last)
        score = functools.partial(_score, query[rows], key, weights[rows], tile)
        selected = rank_positions(score, tile, sparse_count)
        positions[rows, 0, : selected.shape[1]] = selected
    return positions, query.new_empty(0)


def _score(query: Tensor, key: Tensor, weights: Tensor, tile: RowTile) -> Tensor:
    """Scores [rows, num_keys] of one tile, float32."""
    products = torch.relu(torch.einsum("thd,sd->ths", query.float(), gather_rows(key, tile)))
    return torch.einsum("th,ths->ts", weights.float(), products)


def rank_positions(score: Callable[[], Tensor], tile: RowTile, sparse_count: int) -> Tensor:
    """The best positions of each row of a tile.

    Args:
        score: Gives [rows, num_keys]; called only where not every position is selected.
        tile: Rows of one sequence.
        sparse_count: K.

    Returns:
        [rows, <= K] int32 in ascending order, -1 behind them.
    """
    every = torch.arange(tile.num_keys, dtype=torch.int32).expand(len(tile.limits), -1)
    is_visible = every < tile.limits[:, None]
    if tile.num_keys <= sparse_count:
        return torch.where(is_visible, every, NO_POSITION)
    scores = score().masked_fill(~is_visible, float("-inf"))
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :sparse_count]
    # Invisible positions may fill the tail of a short row; they sort behind every visible one.
    ranked = torch.where(ranked < tile.limits[:, None], ranked, tile.num_keys).sort(-1).values
    return ranked.masked_fill(ranked == tile.num_keys, NO_POSITION).to(torch.int32)


def _native_lightning_indexer(
    native: Native,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = _CAUSAL,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    _check(query, key, weights, layout_query, layout_key, sparse_mode, unused)
    require_step(_NAME, actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    tokens, heads, _ = query.shape
    positions = block_table.new_empty(tokens, 1, sparse_count)
    native.call(
        "lightning_indexer", query.dtype,
        (
            tokens, heads, weights.stride(0), block_table.shape[0], block_table.shape[1],
            key.shape[0], sparse_count,
        ),
        query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
        positions,
    )  # fmt: skip
    return positions, query.new_empty(0)


def _check(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    layout_query: str,
    layout_key: str,
    sparse_mode: int,
    unused: dict[str, object],
) -> None:
    require(query.dim() == 3, _NAME, "query must be [T, Hi, Di]")
    is_paged = key.dim() == 4 and key.shape[1:3] == (_BLOCK, 1)
    require(is_paged, _NAME, "key must be [B, 128, 1, Di]")
    require(query.shape[-1] == _HEAD and key.shape[-1] == _HEAD, _NAME, "heads must be 128 wide")
    require(weights.shape == query.shape[:2], _NAME, "weights must be [T, Hi]")
    require(layout_query == "TND", _NAME, "layout_query {!r} must be 'TND'", layout_query)
    require(layout_key == "PA_BSND", _NAME, "layout_key {!r} must be 'PA_BSND'", layout_key)
    require(sparse_mode == _CAUSAL, _NAME, "sparse_mode {} must be 3", sparse_mode)
    require(not unused.get("return_value"), _NAME, "return_value needs an unpaged cache")
    require_contiguous(_NAME, query, key)
    require_same_float(_NAME, query, key, weights)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {_NAME: lightning_indexer}
    return {_NAME: functools.partial(_native_lightning_indexer, native)}
