"""Attention over the selected positions of the paged latent cache, and the per-head products.

Every head reads the same latent row as key and as value (absorbed MLA). A row walks its position
list up to the first -1; a position at or past its causal bound is ignored; a row without a
position gives zeros.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.ops import dense
from services.worker.ops.checks import (
    require,
    require_contiguous,
    require_int32,
    require_same_float,
    require_step,
)
from services.worker.ops.native import Native
from services.worker.ops.paged import gather_rows, row_tiles

_ATTENTION = "npu_sparse_flash_attention"
_BATCH_MATMUL = "npu_transpose_batchmatmul"
_LATENT = 512
_ROPE = 64
_BLOCK = 128
_MLA_ABSORB = 2
_CAUSAL = 3
_SWAP = [1, 0, 2]
_KEEP = [0, 1, 2]


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = _CAUSAL,
    attention_mode: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to the selected positions.

    Args:
        query: [T, H, C] queries in latent space.
        key: [B, 128, 1, C] latent cache.
        value: The same cache.
        sparse_indices: [T, 1, K] int32 positions, valid ones first, then -1.
        scale_value: Softmax scale.
        block_table: [R, max_blocks] int32.
        actual_seq_lengths_query: [R] int32 inclusive prefix sum of tokens per sequence.
        actual_seq_lengths_kv: [R] int32 KV lengths.
        query_rope: [T, H, 64] rotated queries.
        key_rope: [B, 128, 1, 64] rotary cache.
        sparse_block_size: 1 only.
        layout_query: "TND" only.
        layout_kv: "PA_BSND" only.
        sparse_mode: 3 (right-down causal) or 0 (every key of the sequence).
        attention_mode: 2 only (absorbed MLA); the schema's default is refused by the device too.
        **unused: Window, LSE and sink arguments; only their defaults are accepted.

    Returns:
        [T, H, C] values in latent space and two empty tensors.
    """
    _check_attention(query, key, query_rope, key_rope, sparse_indices)
    require_step(_ATTENTION, actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
    modes = (layout_query, layout_kv, sparse_mode, attention_mode, sparse_block_size)
    require_modes(_ATTENTION, *modes)
    _check_unused(unused)
    output = torch.zeros(query.shape, dtype=query.dtype)
    tiles = row_tiles(
        actual_seq_lengths_query, actual_seq_lengths_kv, block_table, key.shape[1],
        is_causal=sparse_mode == _CAUSAL,
    )  # fmt: skip
    for tile in tiles:
        rows = slice(tile.first, tile.last)
        is_chosen = chosen_positions(sparse_indices[rows, 0], tile.limits, tile.num_keys)
        latent, rope = gather_rows(key, tile), gather_rows(key_rope, tile)
        output[rows] = attend_rows(
            query[rows].float(), query_rope[rows].float(), latent, rope, is_chosen, scale_value
        ).to(query.dtype)
    return output, torch.empty(0), torch.empty(0)


def attend_rows(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    is_chosen: Tensor,
    scale: float,
) -> Tensor:
    """Rows [rows, H, C] over keys [S, C] and [S, 64], where `is_chosen` [rows, S]."""
    logits = torch.einsum("thc,sc->ths", query, latent)
    logits += torch.einsum("thr,sr->ths", query_rope, rope)
    logits = (logits * scale).masked_fill(~is_chosen[:, None], float("-inf"))
    # A row without a position is all -inf: softmax gives NaN there, and zeros are due.
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    return torch.einsum("ths,sc->thc", weights, latent)


def chosen_positions(indices: Tensor, limits: Tensor, num_keys: int) -> Tensor:
    """[rows, num_keys] whether a row attends to a position."""
    before_end = (indices < 0).cumsum(-1) == 0
    within = torch.arange(indices.shape[1]) < limits[:, None]
    is_used = before_end & within & (indices < limits[:, None])
    chosen = torch.zeros((indices.shape[0], num_keys + 1), dtype=torch.bool)
    chosen.scatter_(1, torch.where(is_used, indices, num_keys).long(), value=True)
    return chosen[:, :num_keys]


def _native_attention(
    native: Native,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = _CAUSAL,
    attention_mode: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_attention(query, key, query_rope, key_rope, sparse_indices)
    require_step(_ATTENTION, actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
    modes = (layout_query, layout_kv, sparse_mode, attention_mode, sparse_block_size)
    require_modes(_ATTENTION, *modes)
    _check_unused(unused)
    tokens, heads, _ = query.shape
    output = query.new_empty(tokens, heads, _LATENT)
    native.call(
        "sparse_attention", query.dtype,
        (
            tokens, heads, block_table.shape[0], block_table.shape[1], key.shape[0],
            sparse_indices.shape[2], int(sparse_mode == _CAUSAL), scale_value,
        ),
        query, query_rope, key, key_rope, sparse_indices, actual_seq_lengths_query,
        actual_seq_lengths_kv, block_table, output,
    )  # fmt: skip
    return output, torch.empty(0), torch.empty(0)


def transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """Per-head product: [H, T, M] ([T, H, M] with `perm_x1` swapped) by [H, M, N] -> [T, H, N]."""
    require(bias is None and scale is None, _BATCH_MATMUL, "bias and scale are not supported")
    require(batch_split_factor in {None, 1}, _BATCH_MATMUL, "batch_split_factor must be 1")
    by_head = _by_head(input, weight, perm_x1, perm_x2, perm_y)
    require_contiguous(_BATCH_MATMUL, weight)
    return torch.bmm(by_head, weight).transpose(0, 1).contiguous()


def _native_batchmatmul(
    native: Native,
    input: Tensor,
    weight: Tensor,
    *,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    **unused: object,
) -> Tensor:
    require(not any(unused.values()), _BATCH_MATMUL, "{} are not supported", unused)
    by_head = _by_head(input, weight, perm_x1, perm_x2, perm_y)
    packed = dense.is_packed(_BATCH_MATMUL, weight)
    heads, tokens, inner = by_head.shape
    if by_head.stride(2) != 1:
        by_head = by_head.contiguous()
    outer = weight.shape[2]
    output = input.new_empty(tokens, heads, outer)
    numbers = (tokens, heads, inner, outer, by_head.stride(1), by_head.stride(0), packed)
    native.call("head_matmul", input.dtype, numbers, by_head, weight, output)
    return output


def _by_head(
    input: Tensor,
    weight: Tensor,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
) -> Tensor:
    """The input as [H, T, M]."""
    require(perm_x2 is None or list(perm_x2) == _KEEP, _BATCH_MATMUL, "perm_x2 must be [0, 1, 2]")
    require(perm_y is None or list(perm_y) == _SWAP, _BATCH_MATMUL, "perm_y must be [1, 0, 2]")
    is_swapped = perm_x1 is not None and list(perm_x1) == _SWAP
    by_head = input.transpose(0, 1) if is_swapped else input
    is_matching = by_head.shape[::2] == weight.shape[:2]
    require(is_matching, _BATCH_MATMUL, "input and weight differ in heads or in size")
    require_same_float(_BATCH_MATMUL, input, weight)
    return by_head


def _check_attention(
    query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, sparse_indices: Tensor
) -> None:
    require(query.dim() == 3, _ATTENTION, "query must be [T, H, C]")
    is_paged = key.dim() == 4 and key.shape[1:3] == (_BLOCK, 1)
    require(is_paged, _ATTENTION, "key must be [B, 128, 1, C]")
    require(query.shape[-1] == _LATENT, _ATTENTION, "query must be 512 wide")
    require(key.shape[-1] == _LATENT, _ATTENTION, "key must be 512 wide")
    rope = (*query.shape[:2], _ROPE)
    require(query_rope.shape == rope, _ATTENTION, "query_rope must be [T, H, 64]")
    rope = (*key.shape[:3], _ROPE)
    require(key_rope.shape == rope, _ATTENTION, "key_rope must be [B, 128, 1, 64]")
    rows = (query.shape[0], 1)
    require(sparse_indices.shape[:2] == rows, _ATTENTION, "sparse_indices must be [T, 1, K]")
    require_int32(_ATTENTION, sparse_indices)
    require_contiguous(_ATTENTION, query, key, query_rope, key_rope)
    require_same_float(_ATTENTION, query, key, query_rope, key_rope)


def require_modes(
    operator: str,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    attention_mode: int,
    sparse_block_size: int,
) -> None:
    """The one layout and the modes that attention over a paged latent cache has here."""
    require(layout_query == "TND", operator, "layout_query {!r} must be 'TND'", layout_query)
    require(layout_kv == "PA_BSND", operator, "layout_kv {!r} must be 'PA_BSND'", layout_kv)
    require(sparse_mode in {0, _CAUSAL}, operator, "sparse_mode {} must be 0 or 3", sparse_mode)
    require(attention_mode == _MLA_ABSORB, operator, "attention_mode must be 2")
    require(sparse_block_size == 1, operator, "sparse_block_size must be 1")


def _check_unused(unused: dict[str, object]) -> None:
    require(not unused.get("return_softmax_lse"), _ATTENTION, "no LSE with a paged cache")
    require(unused.get("sinks") is None, _ATTENTION, "sinks are not supported")


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {_ATTENTION: sparse_flash_attention, _BATCH_MATMUL: transpose_batchmatmul}
    return {
        _ATTENTION: functools.partial(_native_attention, native),
        _BATCH_MATMUL: functools.partial(_native_batchmatmul, native),
    }
