"""RMS norms of the decoder."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        normed: Tensor = torch.ops.npu.npu_rms_norm(x, self.weight, self.epsilon)[0]
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise ``x + residual``; returns the norm and the sum, the next residual."""
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, self.weight, self.epsilon)
        return normed, total
