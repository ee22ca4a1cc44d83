"""Each copy of a token is sent to the rank of its expert, and its result comes back.

Tokens are cut over the tensor-parallel ranks first, so that no copy is sent twice. How many rows
go where is known to the host alone after the router ran: such a step cannot be captured.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.model.exchange import Gate, own_tokens
from services.worker.model.metadata import ExpertTraffic
from services.worker.model.routed import RoutedExperts
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import Stream

Ints = NDArray[np.int64]


class AllToAllExchange:
    """Rows of as many copies as there are."""

    def __init__(self, spec: ModelSpec, gate: Gate, block: RoutedExperts) -> None:
        config, placement = spec.config, spec.placement
        self._gate = gate
        self._block = block
        self._group = spec.groups.ep
        self._every = [0, config.n_routed_experts]
        self._rank = placement.ep_rank
        held = [
            replace(placement, ep_rank=rank).experts(config.n_routed_experts)
            for rank in range(placement.ep_size)
        ]
        self._firsts = [experts.start for experts in held]
        """First expert of each rank."""

    def sums(self, x: Tensor, stream: Stream, traffic: ExpertTraffic) -> tuple[Tensor, slice]:
        """Send, compute, send back, add up."""
        # A rank without tokens of its own works on one of padding: kernels want at least one row.
        mine, place = own_tokens(x, stream)
        weights, experts = self._gate(mine)
        shards, is_quantized = self._block.shards, self._block.is_quantized
        rows, order, counts, scales = shards.sort(mine, experts, self._every, is_quantized)
        sent, received, arriving = self._splits(np.array(self._group.gather_counts(counts)))
        rows = self._group.all_to_all(rows, received, sent)
        if is_quantized:
            scales = self._group.all_to_all(scales, received, sent)
        products = self._compute(rows, scales, arriving, x.dtype)
        products = self._group.all_to_all(products, sent, received)
        weights = weights.to(products.dtype)
        sums = torch.ops.npu.npu_moe_token_unpermute(products, order, weights)
        return sums[: place.stop - place.start], place

    def _splits(self, counts: Ints) -> tuple[list[int], list[int], Ints]:
        """Rows sent to each rank, rows received from each, and the latter by rank and expert."""
        sent = np.add.reduceat(counts[self._rank], self._firsts)
        arriving = counts[:, self._firsts[self._rank] :][:, : len(self._block.shards.experts)]
        return sent.tolist(), arriving.sum(axis=1).tolist(), arriving

    def _compute(self, rows: Tensor, scales: Tensor, arriving: Ints, dtype: torch.dtype) -> Tensor:
        """Products of the rows that arrived, which are ordered by rank first, then by expert."""
        if not len(rows):
            return rows.new_empty(rows.shape, dtype=dtype)
        num_ranks, num_experts = arriving.shape
        owners = np.tile(np.arange(num_experts, dtype=np.int32), num_ranks)
        experts = torch.from_numpy(owners.repeat(arriving.reshape(-1)))[:, None].to(rows.device)
        by_expert, order, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
            rows,
            experts,
            scale=scales if self._block.is_quantized else None,
            active_num=len(rows),
            expert_num=num_experts,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, num_experts],
            quant_mode=-1,
        )
        return self._block.multiply(by_expert, scales, counts).index_select(0, order)
