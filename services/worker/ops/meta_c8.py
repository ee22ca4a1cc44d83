"""Shape functions of the operators behind the 8-bit caches."""

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.scalar_types import to_dtype

_META = torch.device("meta")


def _block_quant(
    x: Tensor, *, dst_type: int = 1, col_block_size: int = 128, **unused: object
) -> tuple[Tensor, Tensor]:
    columns = -(-x.shape[-1] // col_block_size)
    return (
        torch.empty(x.shape, dtype=to_dtype(dst_type), device=_META),
        torch.empty((*x.shape[:-1], columns), dtype=torch.float32, device=_META),
    )


def _quant_attention(
    query: Tensor, *rest: object, rope_head_dim: int = 64, **unused: object
) -> Tensor:
    shape = (*query.shape[:-1], query.shape[-1] - rope_head_dim)
    return torch.empty(shape, dtype=query.dtype, device=_META)


def _quant_indexer(
    query: Tensor, *rest: object, sparse_count: int = 2048, **unused: object
) -> Tensor:
    return torch.empty((query.shape[0], 1, sparse_count), dtype=torch.int32, device=_META)


def kernels() -> dict[str, Callable[..., object]]:
    """Shape function of each operator."""
    return {
        "npu_dynamic_block_quant": _block_quant,
        "npu_kv_quant_sparse_flash_attention": _quant_attention,
        "npu_quant_lightning_indexer": _quant_indexer,
    }
