"""Routed experts that are spread over ranks: each method brings tokens there and sums back."""

from typing import Protocol

import torch
from torch import Tensor

from services.worker.model.metadata import ExpertTraffic
from services.worker.model.routed import RoutedExperts
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import Stream, padded_rows
from services.worker.parallel.groups import Group


class Gate(Protocol):
    """Chooses experts."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights [T, k] float32 and experts [T, k] int32."""
        ...


class Exchange(Protocol):
    """One method, for one layer."""

    def sums(self, x: Tensor, stream: Stream, traffic: ExpertTraffic) -> tuple[Tensor, slice]:
        """What the routed experts add to this rank's share of the tokens.

        Args:
            x: [.., E] tokens in the form of the stream.
            stream: The step's.
            traffic: The step's method and the tokens of the largest replica.

        Returns:
            Sums [N, E], and to which N rows of `x` they belong. Where the stream is whole the
            tensor-parallel ranks' sums must be added up; a row may be with one or with all.
        """
        ...


def own_tokens(x: Tensor, stream: Stream) -> tuple[Tensor, slice]:
    """This rank's share of the tokens, and where it lies in `x`.

    Ranks of a whole stream have the same tokens: each sends its share, so no copy is sent twice.
    """
    share = stream.share
    return stream.own(x), slice(0, share.count) if stream.is_cut else share.rows


def most_own(stream: Stream, traffic: ExpertTraffic) -> int:
    """Tokens of the largest share of all replicas."""
    return -(-traffic.num_tokens // stream.share.size)


class GatherExchange:
    """Every rank sees the tokens of all replicas and computes what its experts add to each."""

    def __init__(self, spec: ModelSpec, gate: Gate, block: RoutedExperts) -> None:
        self._gate = gate
        self._block = block
        self._replicas, self._world = spec.groups.dp, spec.groups.ep
        self._nobody = spec.config.n_routed_experts

    def sums(self, x: Tensor, stream: Stream, traffic: ExpertTraffic) -> tuple[Tensor, slice]:
        """Gather over the replicas, compute, give each replica its sums.

        Of a cut stream shares are gathered, over all ranks that hold experts, and go back so.
        """
        weights, experts = self._gate(x)
        if stream.is_cut:
            real, most = stream.share.count, most_own(stream, traffic)
            sums = self._over(self._world, x, weights, experts[:real], most)
        elif self._replicas.size > 1:
            sums = self._over(self._replicas, x, weights, experts, traffic.num_tokens)
        else:
            sums = self._block(x, weights, experts)
        return sums[: len(x)], slice(0, len(x))

    def _over(
        self, group: Group, x: Tensor, weights: Tensor, experts: Tensor, count: int
    ) -> Tensor:
        """Sums for `count` rows of this rank; those without a choice chose nobody."""
        tokens = group.all_gather(padded_rows(x, count))
        # One exchange for weights and choices; padding chose an expert that nobody has.
        bits = padded_rows(weights, count).view(torch.int32)
        routing = torch.cat((bits, padded_rows(experts, count, self._nobody)), dim=1)
        bits, experts = group.all_gather(routing).chunk(2, dim=1)
        weights = bits.contiguous().view(torch.float32)
        return group.reduce_scatter(self._block(tokens, weights, experts.contiguous()))
