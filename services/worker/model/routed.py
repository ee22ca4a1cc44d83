"""What all kinds of routed experts share: their face, and which of them a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.worker.model.shards import Shard
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec


class RoutedExperts(Protocol):
    """The routed experts of one layer on one rank."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum of the chosen experts that are here.

        Args:
            x: [T, E].
            weights: [T, k] float32 weights of the chosen experts.
            experts: [T, k] int32 chosen experts, of all ranks.

        Returns:
            [T, E].
        """
        ...

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of the experts that are here."""
        ...

    def finish_loading(self) -> None:
        """Bring loaded weights into the form that the products want."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShards:
    """A rank's experts of one layer: whole ones, or a part of each."""

    prefix: str
    num_experts: int
    """Experts of the layer on all ranks."""
    experts: range
    """Those of this rank."""
    hidden: int
    full_width: int
    columns: slice
    """This rank's part of each expert's width."""

    @classmethod
    def cut(cls, spec: ModelSpec, prefix: str) -> ExpertShards:
        """The experts behind `prefix` that the spec's rank holds."""
        config, placement = spec.config, spec.placement
        return cls(
            prefix=prefix,
            num_experts=config.n_routed_experts,
            experts=placement.experts(config.n_routed_experts),
            hidden=config.hidden_size,
            full_width=config.moe_intermediate_size,
            columns=placement.expert_share(config.moe_intermediate_size),
        )

    def add_up(self, products: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts that are here.

        Args:
            products: [T * k, E] rows by expert; those of experts elsewhere are not set.
            order: [T * k] row of each choice, -1 for an expert that is elsewhere.
            weights: [T, k].

        Returns:
            [T, E].
        """
        weights = weights.to(products.dtype)
        if len(self.experts) < self.num_experts:
            is_elsewhere = order < 0
            weights = weights.masked_fill(is_elsewhere.view_as(weights), 0)
            order = order.clamp_min(0)
            # They take row 0 with weight 0. If no row was computed here it holds anything, NaN
            # among it, which no weight makes harmless.
            first = products[:1]
            first.copy_(first.masked_fill(is_elsewhere.all(), 0))
        total: Tensor = torch.ops.npu.npu_moe_token_unpermute(products, order, weights)
        return total

    @property
    def width(self) -> int:
        """Inner width of an expert on this rank."""
        width: int = self.columns.stop - self.columns.start
        return width

    @property
    def active_range(self) -> list[int]:
        """First expert and one past the last, as the sorting operator takes them."""
        return [self.experts.start, self.experts.stop]

    def matrices(self) -> Iterator[tuple[tuple[str, Shard], ...]]:
        """For each expert here, gate, up and down with the start of their tensors' names.

        Gate and up are side by side in one product: their targets say where.
        """
        for expert in self.experts:
            start = f"{self.prefix}{expert}."
            up_target = slice(self.width, 2 * self.width)
            yield (
                (f"{start}gate_proj.", self._in_part("gate_proj", slice(0, self.width))),
                (f"{start}up_proj.", self._in_part("up_proj", up_target)),
                (f"{start}down_proj.", self._out_part()),
            )

    def _in_part(self, name: str, target: slice) -> Shard:
        return Shard(
            name=name,
            size_out=self.full_width,
            size_in=self.hidden,
            rows=self.columns,
            columns=slice(0, self.hidden),
            target=target,
        )

    def _out_part(self) -> Shard:
        return Shard(
            name="down_proj",
            size_out=self.hidden,
            size_in=self.full_width,
            rows=slice(0, self.hidden),
            columns=self.columns,
            target=slice(0, self.hidden),
        )
