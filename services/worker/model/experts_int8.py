"""Routed experts with int8 weights and int8 activations."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.model.linear_int8 import INT8, to_blocked_layout, zero_offset_slot
from services.worker.model.routed import ExpertShards, weighted_sum
from services.worker.model.slots import WeightSlot, column_slot, matrix_slot, scale_slot
from services.worker.model.spec import ModelSpec


class Int8Experts:
    """W8A8_DYNAMIC experts: rows are quantized while they are sorted.

    In the blocked layout the first product, its scales, the gated unit and the next quantization
    are one operator.
    """

    def __init__(self, spec: ModelSpec, shards: ExpertShards) -> None:
        self._spec = spec
        self.shards = shards
        self.is_quantized = True
        device, count = spec.device, len(shards.experts)
        hidden, width = shards.hidden, shards.width
        self.w13 = torch.empty((count, hidden, 2 * width), dtype=torch.int8, device=device)
        self.w2 = torch.empty((count, width, hidden), dtype=torch.int8, device=device)
        self.w13_scale = torch.empty((count, 2 * width), dtype=torch.float32, device=device)
        # Of the results' type: the device's grouped product takes no other beside bfloat16.
        self.w2_scale = torch.empty((count, hidden), dtype=spec.dtype, device=device)
        self._gated = self._gated_in_one if spec.weight_nz_mode else self._gated_in_two

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of the chosen experts [T, E]."""
        return weighted_sum(self, x, weights, experts)

    def multiply(self, rows: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        """Both products and the gated unit."""
        hidden, hidden_scales = self._gated(rows, scales, counts)
        products = torch.ops.npu.npu_grouped_matmul(
            [hidden],
            [self.w2],
            scale=[self.w2_scale],
            per_token_scale=[hidden_scales],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
            output_dtype=self._spec.dtype,
        )
        result: Tensor = products[0]
        return result

    def _gated_in_one(self, rows: Tensor, scales: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """First product and gated unit, quantized again: int8 [A, I] and scales [A]."""
        gated: tuple[Tensor, Tensor] = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
            rows, [self.w13], [self.w13_scale], scales, counts, group_list_type=1
        )
        return gated

    def _gated_in_two(self, rows: Tensor, scales: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The same for weights in the plain layout, which the operator for both does not take."""
        sums = torch.ops.npu.npu_grouped_matmul(
            [rows],
            [self.w13],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
            output_dtype=torch.int32,
        )[0]
        hidden, hidden_scales = torch.ops.npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=self.w13_scale,
            activation_scale=scales,
            group_index=counts,
            activate_left=True,
            quant_mode=1,  # a scale per row, found from the row
        )
        return hidden, hidden_scales

    def slots(self) -> Iterator[WeightSlot]:
        """Weights and scales of each expert's three matrices."""
        for at, expert in enumerate(self.shards.matrices()):
            matrices = (self.w13[at], self.w13[at], self.w2[at])
            scales = (self.w13_scale[at], self.w13_scale[at], self.w2_scale[at])
            for (name, part), matrix, scale in zip(expert, matrices, scales, strict=True):
                target = matrix[:, part.target].t()
                yield matrix_slot(f"{name}weight", target, part, types=INT8)
                yield scale_slot(column_slot(f"{name}weight_scale", scale[part.target], part))
                yield zero_offset_slot(f"{name}weight_offset", part.size_out)

    def finish_loading(self) -> None:
        """Change the weights' layout."""
        self.w13 = to_blocked_layout(self.w13, self._spec)
        self.w2 = to_blocked_layout(self.w2, self._spec)
