"""RMS norms: float32 inside, the input's type outside.

The NPU multiplies by gamma in float32 and rounds once; transformers rounds before it multiplies.
In bfloat16 the two differ by one rounding, in float32 not at all.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_contiguous, require_same_float
from services.worker.ops.native import Native


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Normalise the last dimension of `input` [..., N]; returns it and the factors [..., 1]."""
    wide = input.float()
    factors = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * factors * gamma.float()).to(input.dtype), factors


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm of ``x1 + x2``; returns the norm, the factors and the sum (rounded, then normalised)."""
    total = x1 + x2
    normed, factors = rms_norm(total, gamma, epsilon)
    return normed, factors, total


def _native_rms_norm(
    native: Native, input: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    _check_norm("npu_rms_norm", input, gamma)
    if input.dim() != 2:
        flat, flat_factors = _native_rms_norm(native, input.flatten(0, -2), gamma, epsilon)
        return flat.view(input.shape), flat_factors.view(*input.shape[:-1], 1)
    rows, width = input.shape
    if input.stride(1) != 1:
        input = input.contiguous()
    output = input.new_empty(rows, width)
    factors = torch.empty(rows, 1, dtype=torch.float32)
    numbers = (rows, width, input.stride(0), epsilon)
    native.call("rms_norm", input.dtype, numbers, input, gamma, output, factors)
    return output, factors


def _native_add_rms_norm(
    native: Native, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    _check_norm("npu_add_rms_norm", x1, gamma)
    require(x1.dim() == 2 and x1.shape == x2.shape, "npu_add_rms_norm", "x1, x2 must be [T, N]")
    require_same_float("npu_add_rms_norm", x1, x2)
    rows, width = x1.shape
    output, total = x1.new_empty(rows, width), x1.new_empty(rows, width)
    factors = torch.empty(rows, 1, dtype=torch.float32)
    native.call(
        "add_rms_norm", x1.dtype, (rows, width, epsilon),
        x1.contiguous(), x2.contiguous(), gamma, output, factors, total,
    )  # fmt: skip
    return output, factors, total


def _check_norm(operator: str, input: Tensor, gamma: Tensor) -> None:
    require(gamma.shape == input.shape[-1:], operator, "gamma must match the rows")
    require_same_float(operator, input, gamma)
    require_contiguous(operator, gamma)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {"npu_rms_norm": rms_norm, "npu_add_rms_norm": add_rms_norm}
    return {
        "npu_rms_norm": functools.partial(_native_rms_norm, native),
        "npu_add_rms_norm": functools.partial(_native_add_rms_norm, native),
    }
