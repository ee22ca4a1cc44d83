"""Rotary angles by position, shared by main attention and indexer (both rotate 64 lanes)."""

import torch
from torch import Tensor


class RotaryTables:
    """Cosines and sines of every position, in the layout `npu_interleave_rope` reads."""

    def __init__(
        self,
        *,
        dim: int,
        theta: float,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if device.type == "meta":
            # No numbers to compute: those of a million positions take longer than all layers.
            shape = (max_positions, dim)
            self._cos, self._sin = (torch.empty(shape, dtype=dtype, device=device) for _ in "cs")
            return
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies = 1.0 / (theta**exponents)
        # Angles in float32 on the host: positions below 2**24 are exact there.
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = self._table(angles.cos(), dtype, device)
        self._sin = self._table(angles.sin(), dtype, device)

    @staticmethod
    def _table(half: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.cat((half, half), dim=-1).to(dtype=dtype, device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, 1, 64] of `positions` [T]."""
        shape = (-1, 1, 1, self._cos.shape[1])
        return (
            self._cos.index_select(0, positions).view(shape),
            self._sin.index_select(0, positions).view(shape),
        )
