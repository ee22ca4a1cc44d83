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

    def multiply(self, rows: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert that is here to its rows.

        Args:
            rows: [A, E] by expert; int8 if `is_quantized`.
            scales: [A] float32 of int8 rows.
            counts: [G] int64 rows of each expert; those behind them are not read.

        Returns:
            [A, E] in the model's type.
        """
        ...

    @property
    def shards(self) -> ExpertShards:
        """Which experts are here."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether rows are multiplied in int8."""
        ...

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of the experts that are here."""
        ...

    def finish_loading(self) -> None:
        """Bring loaded weights into the form that the products want."""
        ...


def weighted_sum(block: RoutedExperts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """``sum_j weight_j * expert_j(x)`` over the experts that are here: what `__call__` does."""
    shards = block.shards
    rows, order, counts, scales = shards.sort(x, experts, shards.active_range, block.is_quantized)
    return shards.add_up(block.multiply(rows, scales, counts), order, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShards:
    """A rank's experts of one layer: whole ones, or a part of each."""

    prefix: str
    num_experts: int
    """Experts of the layer on all ranks."""
    num_ids: int
    """One more where a rank sees tokens of other ranks: what pads them chose nobody."""
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
        has_padding = placement.ep_size > placement.tp_size or placement.has_whole_shared_experts
        return cls(
            prefix=prefix,
            num_experts=config.n_routed_experts,
            num_ids=config.n_routed_experts + has_padding,
            experts=placement.experts(config.n_routed_experts),
            hidden=config.hidden_size,
            full_width=config.moe_intermediate_size,
            columns=placement.expert_share(config.moe_intermediate_size),
        )

    def sort(
        self, x: Tensor, experts: Tensor, active_range: list[int], is_quantizing: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copies of tokens by expert.

        Args:
            x: [T, E].
            experts: [T, k] int32 chosen experts, of all ranks.
            active_range: First expert whose copies are wanted, and one past the last.
            is_quantizing: Whether the copies shall be int8.

        Returns:
            [T * k, E] copies, [T * k] row of each choice or -1, [G] copies of each expert, and
            [T * k] scales of int8 copies.
        """
        sorted_copies: tuple[Tensor, Tensor, Tensor, Tensor]
        sorted_copies = torch.ops.npu.npu_moe_init_routing_v2(
            x,
            experts,
            active_num=experts.numel(),
            expert_num=self.num_ids,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=active_range,
            quant_mode=1 if is_quantizing else -1,
        )
        return sorted_copies

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
