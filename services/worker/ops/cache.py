"""Writes into the paged caches: the latent with its rotary part, and indexer keys.

A slot is ``block id * 128 + offset``. A slot of -1 writes nothing.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import FLOATS, require, require_contiguous, require_same_float
from services.worker.ops.native import Native
from services.worker.ops.norm import rms_norm
from services.worker.ops.rope import ROPE_DIM, rotate_pairs

# Rows of plain caches; packed rows and 8-bit keys; scales of the keys.
_ROW_TYPES = (*FLOATS, torch.int8, torch.float16)


def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Write ``norm(kv[..., :C])`` to `ckv_cache` and the rotated rest to `k_cache`, in place.

    Args:
        kv: [T, 1, 1, C + 64].
        gamma: [C].
        cos: [T, 1, 1, 64].
        sin: [T, 1, 1, 64].
        index: [T] int64 slots; -1 writes nothing.
        k_cache: [B, 128, 1, 64], the *rotary* cache, written.
        ckv_cache: [B, 128, 1, C], the *latent* cache, written.
        epsilon: Of the norm.
        cache_mode: "PA" only: the caches are paged.
        is_output_kv: Whether the written rows are returned; empty tensors otherwise.
        **unused: Quantization arguments; any that is set is refused.

    Returns:
        Rotary rows and latent rows, or two empty tensors.
    """
    _check_write(kv, gamma, cos, sin, index, k_cache, ckv_cache, cache_mode, unused)
    width = gamma.shape[0]
    latent, _ = rms_norm(kv[..., :width], gamma, epsilon)
    rope = rotate_pairs(kv[..., width:], cos, sin)
    slots, kept = _kept(index)
    k_cache.view(-1, ROPE_DIM)[slots] = rope.view(-1, ROPE_DIM)[kept]
    ckv_cache.view(-1, width)[slots] = latent.view(-1, width)[kept]
    if is_output_kv:
        return rope, latent
    return kv.new_empty(0), kv.new_empty(0)


def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Set rows ``indices`` [T, 1] of `input` [rows, N] to `updates` [T, N], in place; -1: none."""
    _check_scatter(input, indices, updates)
    slots, kept = _kept(indices.view(-1))
    input[slots] = updates[kept]
    return input


def _kept(index: Tensor) -> tuple[Tensor, Tensor]:
    kept = index >= 0
    return index[kept].long(), kept


def _native_kv_write(
    native: Native,
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    if is_output_kv:
        return kv_rmsnorm_rope_cache(
            kv, gamma, cos, sin, index, k_cache, ckv_cache,
            epsilon=epsilon, cache_mode=cache_mode, is_output_kv=True, **unused,
        )  # fmt: skip
    _check_write(kv, gamma, cos, sin, index, k_cache, ckv_cache, cache_mode, unused)
    if kv.stride(3) != 1:
        kv = kv.contiguous()
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    native.call(
        "kv_rmsnorm_rope_cache", kv.dtype,
        (kv.shape[0], gamma.shape[0], kv.stride(0), num_slots, epsilon),
        kv, gamma, cos.contiguous(), sin.contiguous(), index, k_cache, ckv_cache,
    )  # fmt: skip
    return kv.new_empty(0), kv.new_empty(0)


def _native_scatter(native: Native, input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    _check_scatter(input, indices, updates)
    rows, width = input.shape
    if indices.dtype is not torch.int64:
        indices = indices.to(torch.int64)
    if updates.stride(1) != 1:
        updates = updates.contiguous()
    size = input.element_size()
    numbers = (updates.shape[0], width * size, updates.stride(0) * size, rows)
    native.call("scatter_rows", torch.float32, numbers, indices.contiguous(), updates, input)
    return input


def _check_write(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    cache_mode: str,
    unused: dict[str, object],
) -> None:
    name = "npu_kv_rmsnorm_rope_cache_v2"
    for argument, value in unused.items():
        require(value is None, name, "{} is not supported on CPU", argument)
    require(cache_mode == "PA", name, "cache_mode {!r} must be 'PA'", cache_mode)
    require(kv.dim() == 4 and kv.shape[1:3] == (1, 1), name, "kv must be [T, 1, 1, C + 64]")
    require(kv.shape[-1] == gamma.shape[0] + ROPE_DIM, name, "kv width must be gamma's plus 64")
    require(index.dtype == torch.int64, name, "index must be int64")
    require(index.shape == (kv.shape[0],), name, "index must have one slot per token")
    # The two caches are easily swapped: the rotary one comes first.
    require(k_cache.shape[-1] == ROPE_DIM, name, "k_cache must be the rotary cache")
    require(ckv_cache.shape[-1] == gamma.shape[0], name, "ckv_cache must be the latent cache")
    require(k_cache.shape[:3] == ckv_cache.shape[:3], name, "the caches differ in blocks")
    require_contiguous(name, k_cache, ckv_cache, index)
    require_same_float(name, kv, gamma, cos, sin, k_cache, ckv_cache)


def _check_scatter(input: Tensor, indices: Tensor, updates: Tensor) -> None:
    name = "npu_scatter_nd_update_"
    require(input.dim() == 2 and updates.dim() == 2, name, "input and updates must be 2-D")
    require(indices.dim() == 2 and indices.shape[1] == 1, name, "indices must be [T, 1]")
    require(indices.dtype in {torch.int32, torch.int64}, name, "indices must be int32 or int64")
    require(updates.shape == (indices.shape[0], input.shape[1]), name, "updates must be [T, N]")
    require_contiguous(name, input)
    is_same = input.dtype is updates.dtype
    require(is_same, name, "updates must be {} as input is", input.dtype)
    require(input.dtype in _ROW_TYPES, name, "rows of {} are not written", input.dtype)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {
            "npu_kv_rmsnorm_rope_cache_v2": kv_rmsnorm_rope_cache,
            "npu_scatter_nd_update_": scatter_nd_update_,
        }
    return {
        "npu_kv_rmsnorm_rope_cache_v2": functools.partial(_native_kv_write, native),
        "npu_scatter_nd_update_": functools.partial(_native_scatter, native),
    }
