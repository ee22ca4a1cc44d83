"""RMS norms of the decoder."""

import torch
from torch import Tensor


class RMSNorm:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        normed: Tensor = torch.ops.npu.npu_rms_norm(x, self.weight, self.epsilon)[0]
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise ``x + residual``; returns the norm and the sum, the next residual."""
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, self.weight, self.epsilon)
        return normed, total
