"""Shape functions of the expert products in int8."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.worker.ops.expert_sums import num_columns
from services.worker.ops.scalar_types import to_dtype

_META = torch.device("meta")


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=_META)


def _grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    output_dtype: object = None,
    **unused: object,
) -> list[Tensor]:
    dtype = to_dtype(output_dtype) or x[0].dtype
    return [_empty((x[0].shape[0], num_columns(weight[0])), dtype)]


def _swiglu_quant(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    *rest: object,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    return _rows(x, weight_scale[0].shape[-1])


def _dequant_swiglu_quant(x: Tensor, **unused: object) -> tuple[Tensor, Tensor]:
    return _rows(x, x.shape[-1])


def _rows(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Quantized rows of half the columns, and their scales."""
    return (
        _empty((*x.shape[:-1], columns // 2), torch.int8),
        _empty(x.shape[:-1], torch.float32),
    )


def kernels() -> dict[str, Callable[..., object]]:
    """Shape function of each operator."""
    return {
        "npu_dequant_swiglu_quant": _dequant_swiglu_quant,
        "npu_grouped_matmul": _grouped_matmul,
        "npu_grouped_matmul_swiglu_quant_v2": _swiglu_quant,
    }
