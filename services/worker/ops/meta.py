"""Shape functions of the operators, so that a step can run on meta tensors without a device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.ops import meta_c8, meta_distribute, meta_moe_quant, meta_quant

_META = torch.device("meta")


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=_META)


def _rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), _empty((*input.shape[:-1], 1), torch.float32)


def _add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    return (*_rms_norm(x1, gamma), torch.empty_like(x1))


def _interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _empty(x.shape, x.dtype)


def _kv_write(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, *rest: object, **unused: object
) -> tuple[Tensor, Tensor]:
    rows = kv.shape[:-1]
    return (
        _empty((*rows, cos.shape[-1]), kv.dtype),
        _empty((*rows, gamma.shape[0]), kv.dtype),
    )


def _scatter(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return input


def _lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, sparse_count: int = 2048, **unused: object
) -> tuple[Tensor, Tensor]:
    return _empty((query.shape[0], 1, sparse_count), torch.int32), _empty((0,), query.dtype)


def _sparse_attention(
    query: Tensor, key: Tensor, *rest: object, **unused: object
) -> tuple[Tensor, Tensor, Tensor]:
    empty = _empty((0,), torch.float32)
    return _empty(query.shape, query.dtype), empty, torch.empty_like(empty)


def _gating(x: Tensor, k: int, **unused: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    return (
        _empty((rows, k), x.dtype),
        _empty((rows, k), torch.int32),
        _empty(x.shape, torch.float32),
    )


def _routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    expert_num: int = -1,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    copies = expert_idx.numel()
    first, last = active_expert_range or (0, expert_num)
    return (
        _empty((copies, x.shape[1]), torch.int8 if quant_mode == 1 else x.dtype),
        _empty((copies,), torch.int32),
        _empty((last - first,), torch.int64),
        _empty((copies,), torch.float32),
    )


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    return _empty((*input.shape[:-1], input.shape[-1] // 2), input.dtype)


def _unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, **unused: object
) -> Tensor:
    k = 1 if probs is None else probs.shape[1]
    return _empty((sorted_indices.shape[0] // k, permuted_tokens.shape[1]), permuted_tokens.dtype)


def _transpose_batchmatmul(
    input: Tensor, weight: Tensor, *, perm_x1: Sequence[int] = (0, 1, 2), **unused: object
) -> Tensor:
    tokens = input.shape[list(perm_x1)[1]]
    return _empty((tokens, weight.shape[0], weight.shape[2]), input.dtype)


def kernels() -> dict[str, Callable[..., object]]:
    """Shape function of each operator."""
    return {
        **meta_moe_quant.kernels(),
        **meta_c8.kernels(),
        **meta_distribute.kernels(),
        **meta_quant.kernels(),
        "npu_add_rms_norm": _add_rms_norm,
        "npu_interleave_rope": _interleave_rope,
        "npu_kv_rmsnorm_rope_cache_v2": _kv_write,
        "npu_lightning_indexer": _lightning_indexer,
        "npu_moe_gating_top_k": _gating,
        "npu_moe_init_routing_v2": _routing,
        "npu_moe_token_unpermute": _unpermute,
        "npu_rms_norm": _rms_norm,
        "npu_scatter_nd_update_": _scatter,
        "npu_sparse_flash_attention": _sparse_attention,
        "npu_swiglu": _swiglu,
        "npu_transpose_batchmatmul": _transpose_batchmatmul,
    }
