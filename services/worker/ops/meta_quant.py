"""Shape functions of the dense quantized operators."""

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops import nz
from services.worker.ops.scalar_types import to_dtype


def _dynamic_quant(
    input: Tensor, *, dst_type: int | None = None, **unused: object
) -> tuple[Tensor, Tensor]:
    quantized = torch.empty_like(input, dtype=to_dtype(dst_type) or torch.int8)
    return quantized, input.new_empty(input.shape[:-1], dtype=torch.float32)


def _quantize(input: Tensor, *rest: object, **unused: object) -> Tensor:
    return torch.empty_like(input, dtype=torch.int8)


def _quant_matmul(
    x1: Tensor, x2: Tensor, *rest: object, output_dtype: int | None = None, **unused: object
) -> Tensor:
    shape = (*x1.shape[:-1], x2.shape[-1])
    return x1.new_empty(shape, dtype=to_dtype(output_dtype) or torch.int8)


def _format_cast(input: Tensor, acl_format: int, **unused: object) -> Tensor:
    return nz.shaped(input) if acl_format == nz.FRACTAL_NZ else input.new_empty(input.shape)


def kernels() -> dict[str, Callable[..., object]]:
    """Shape function of each operator."""
    return {
        "npu_dynamic_quant": _dynamic_quant,
        "npu_format_cast": _format_cast,
        "npu_quant_matmul": _quant_matmul,
        "npu_quantize": _quantize,
    }
