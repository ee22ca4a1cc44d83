"""Routed experts that are spread over ranks: each method brings tokens there and sums back."""

from typing import Protocol

import torch
from torch import Tensor

from services.worker.model.metadata import ExpertTraffic
from services.worker.model.routed import RoutedExperts
from services.worker.model.spec import ModelSpec


class Gate(Protocol):
    """Chooses experts."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights [T, k] float32 and experts [T, k] int32."""
        ...


class Exchange(Protocol):
    """One method, for one layer."""

    def add(self, total: Tensor, x: Tensor, traffic: ExpertTraffic) -> None:
        """Add this rank's share of the routed experts' sum.

        Args:
            total: [T, E], changed; the tensor-parallel ranks' totals are added up afterwards.
            x: [T, E] tokens of the replica, the same on its ranks.
            traffic: The step's method and the tokens of the largest replica.
        """
        ...


def padded_rows(x: Tensor, count: int, value: int = 0) -> Tensor:
    """`x` with rows of `value` behind it, `count` in all."""
    if len(x) == count:
        return x
    rows = x.new_full((count, *x.shape[1:]), value)
    rows[: len(x)] = x
    return rows


class TokenSlice:
    """The tokens of a replica cut over its tensor-parallel ranks, each of which sends its part."""

    def __init__(self, spec: ModelSpec) -> None:
        self._size = spec.placement.tp_size
        self._rank = spec.placement.tp_rank

    def of(self, num_tokens: int) -> slice:
        """This rank's tokens; the last ranks may have fewer or none."""
        part = -(-num_tokens // self._size)
        return slice(min(num_tokens, self._rank * part), min(num_tokens, (self._rank + 1) * part))

    def largest(self, num_tokens: int) -> int:
        """Tokens of the rank that has most."""
        return -(-num_tokens // self._size)


class GatherExchange:
    """Every rank sees the tokens of all replicas and computes what its experts add to each."""

    def __init__(self, spec: ModelSpec, gate: Gate, block: RoutedExperts) -> None:
        self._gate = gate
        self._block = block
        self._replicas = spec.groups.dp
        self._nobody = spec.config.n_routed_experts

    def add(self, total: Tensor, x: Tensor, traffic: ExpertTraffic) -> None:
        """Gather over the replicas, compute, give each replica its sums."""
        weights, experts = self._gate(x)
        if self._replicas.size == 1:
            total.add_(self._block(x, weights, experts))
            return
        count = traffic.num_tokens
        tokens = self._replicas.all_gather(padded_rows(x, count))
        # One exchange for weights and choices; padding chose an expert that nobody has.
        bits = padded_rows(weights, count).view(torch.int32)
        routing = torch.cat((bits, padded_rows(experts, count, self._nobody)), dim=1)
        bits, experts = self._replicas.all_gather(routing).chunk(2, dim=1)
        weights = bits.contiguous().view(torch.float32)
        sums = self._block(tokens, weights, experts.contiguous())
        total.add_(self._replicas.reduce_scatter(sums)[: len(x)])
