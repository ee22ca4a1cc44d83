"""A matrix without bias, and the gated MLP made of two of them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.model.slots import WeightSlot, stacked_slots, transposed_slot


class Linear:
    """``x @ weight`` with `weight` [in, out], the transpose of the checkpoint's."""

    def __init__(
        self, size_in: int, size_out: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty((size_in, size_out), dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [T, in]."""
        product: Tensor = torch.ops.glm.linear(x, self.weight)
        return product


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``; gate and up are one matrix, gate first."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self.gate_up_proj = Linear(hidden, 2 * width, dtype, device)
        self.down_proj = Linear(width, hidden, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        return self.down_proj(torch.ops.npu.npu_swiglu(self.gate_up_proj(x)))

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this block."""
        parts = {"gate_proj": self.width, "up_proj": self.width}
        yield from stacked_slots(prefix, parts, self.gate_up_proj.weight)
        yield transposed_slot(f"{prefix}down_proj.weight", self.down_proj.weight)
