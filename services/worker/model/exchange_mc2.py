"""The fused exchange (MC2): one operator sorts, quantizes and sends, another brings sums back.

Its buffers have room for every token of every rank, so nothing waits for the host and a step can
be captured. All ranks pass as many rows; a mask tells which of them are tokens.
"""

import torch
from torch import Tensor

from services.worker.model.exchange import Gate, most_own, own_tokens
from services.worker.model.metadata import ExpertTraffic
from services.worker.model.routed import RoutedExperts
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import Stream, padded_rows

_COUNTS = 1
_PLAIN, _DYNAMIC_INT8 = 0, 2


class Mc2Exchange:
    """Dispatch and combine."""

    def __init__(self, spec: ModelSpec, gate: Gate, block: RoutedExperts) -> None:
        placement = spec.placement
        self._gate = gate
        self._block = block
        self._group = spec.groups.mc2
        self._where = {
            "group_ep": self._group.handle,
            "ep_world_size": placement.ep_size,
            "ep_rank_id": placement.ep_rank,
            "moe_expert_num": spec.config.n_routed_experts,
        }
        self._quant_mode = _DYNAMIC_INT8 if block.is_quantized else _PLAIN
        # An A2 sends the weights along and sums between machines; an A3 takes none here.
        self._sends_weights = spec.cache.generation == "a2"

    def sums(self, x: Tensor, stream: Stream, traffic: ExpertTraffic) -> tuple[Tensor, slice]:
        """Dispatch this rank's tokens, compute what arrives, combine."""
        mine, place = own_tokens(x, stream)
        count, capacity = place.stop - place.start, most_own(stream, traffic)
        mine = padded_rows(mine, capacity)
        is_token = torch.arange(capacity, device=x.device) < count
        weights, experts = self._gate(mine)
        sent = self._group.fused(
            "dispatch", lambda: self._dispatch(mine, weights, experts, is_token)
        )
        rows, scales, assist, counts, received, tp_received, sent_weights = sent
        products = self._block.multiply(rows, scales, counts)
        sums = self._group.fused(
            "combine",
            lambda: torch.ops.npu.npu_moe_distribute_combine_v2(
                expand_x=products,
                expert_ids=experts,
                assist_info_for_combine=assist,
                ep_send_counts=received,
                expert_scales=weights,
                **self._where,
                tp_send_counts=tp_received,
                x_active_mask=is_token,
                expand_scales=sent_weights if self._sends_weights else None,
            ),
        )
        return sums[:count], place

    def _dispatch(
        self, mine: Tensor, weights: Tensor, experts: Tensor, is_token: Tensor
    ) -> tuple[Tensor, ...]:
        sent: tuple[Tensor, ...] = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x=mine,
            expert_ids=experts,
            **self._where,
            x_active_mask=is_token,
            expert_scales=weights if self._sends_weights else None,
            quant_mode=self._quant_mode,
            expert_token_nums_type=_COUNTS,
        )
        return sent
