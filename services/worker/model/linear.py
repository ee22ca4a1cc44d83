"""A product with a float matrix; the other kinds of products have the same face."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from services.worker.model.shards import Shards
from services.worker.model.slots import WeightSlot, matrix_slot


class Projection(Protocol):
    """``x @ weight`` however the weight is stored."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [T, in] -> [T, out]."""
        ...

    def slots(self) -> Iterator[WeightSlot]:
        """Its checkpoint tensors."""
        ...

    def finish_loading(self) -> None:
        """Bring loaded weights into the form that the product wants."""
        ...


class Linear:
    """``x @ weight`` with `weight` [in, out], the transpose of the checkpoint's."""

    def __init__(self, shards: Shards, dtype: torch.dtype, device: torch.device) -> None:
        self._shards = shards
        make = torch.zeros if shards.is_padded else torch.empty
        self.weight = make((shards.size_in, shards.size_out), dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [T, in]."""
        product: Tensor = torch.ops.glm.linear(x, self.weight)
        return product

    def slots(self) -> Iterator[WeightSlot]:
        """One matrix of the file for each part."""
        for name, part in self._shards.named():
            yield matrix_slot(f"{name}weight", self.weight[:, part.target].t(), part)

    def finish_loading(self) -> None:
        """Put the weight into the order in which it is read; no view of it may be taken then."""
        self.weight = torch.ops.glm.pack_weight(self.weight)
