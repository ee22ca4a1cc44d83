"""Routed experts with int4 weights and int8 activations (W4A8_DYNAMIC, one scale per output)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.model.linear_int8 import INT8, to_blocked_layout, zero_offset_slot
from services.worker.model.routed import ExpertShards, weighted_sum
from services.worker.model.shards import Shard
from services.worker.model.slots import (
    FLOATS,
    WeightSlot,
    column_slot,
    matrix_slot,
    scale_slot,
    windowed_slot,
)
from services.worker.model.spec import ModelSpec
from shared.errors import CheckpointError

_CHUNKS = 16
"""Parts of the input for which a down projection's compensation is stored apart."""


class PackedMatrices:
    """One product's int4 matrices of all experts here: packed weights, scales, compensation.

    The device multiplies an int8 activation in two halves, the lower of which it shifts by 8 to
    make it signed. `compensation`, 8 times the sum of each output's weights, takes that back.
    """

    def __init__(self, spec: ModelSpec, count: int, size_in: int, size_out: int) -> None:
        self._spec = spec
        device = spec.device
        # Outputs 2r and 2r + 1 share a byte, the even one in its low half, in the file and here.
        self.weight = torch.empty((count, size_in, size_out // 2), dtype=torch.int8, device=device)
        self.scale = torch.empty((count, size_out), dtype=torch.float32, device=device)
        self.scale_of_one_group = self.scale[:, None]
        self.compensation = torch.empty((count, size_out), dtype=torch.float32, device=device)

    def multiply(self, rows: Tensor, row_scales: Tensor, counts: Tensor) -> Tensor:
        """Multiply each expert's int8 rows [A, in] by its matrix: [A, out] in the model's type."""
        product: Tensor = torch.ops.npu.npu_grouped_matmul(
            [rows],
            [self.weight],
            scale=[self.scale_of_one_group],
            bias=[self.compensation],
            per_token_scale=[row_scales],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
            output_dtype=self._spec.dtype,
        )[0]
        return product

    def multiply_and_gate(
        self, rows: Tensor, row_scales: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gate and up columns multiplied, joined and quantized: int8 [A, out / 2], scales [A]."""
        gated: tuple[Tensor, Tensor] = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
            rows,
            [self.weight],
            [self.scale],
            row_scales,
            counts,
            weight_assist_matrix=[self.compensation],
            group_list_type=1,
        )
        return gated

    def slots(self, expert: int, name: str, part: Shard) -> Iterator[WeightSlot]:
        """Checkpoint tensors of one expert's matrix."""
        if (part.rows.start | part.rows.stop | part.target.start | part.target.stop) % 2:
            raise CheckpointError(f"{name}weight: outputs that share a byte are on two ranks")
        packed = Shard(
            name=part.name,
            size_out=part.size_out // 2,
            size_in=part.size_in,
            rows=slice(part.rows.start // 2, part.rows.stop // 2),
            columns=part.columns,
            target=slice(part.target.start // 2, part.target.stop // 2),
        )
        target = self.weight[expert][:, packed.target].t()
        yield matrix_slot(f"{name}weight", target, packed, types=INT8)
        yield scale_slot(column_slot(f"{name}weight_scale", self.scale[expert, part.target], part))
        yield zero_offset_slot(f"{name}weight_offset", part.size_out)
        yield self._compensation_slot(f"{name}scale_bias", expert, part)

    def _compensation_slot(self, name: str, expert: int, part: Shard) -> WeightSlot:
        """[out, 1], or [out, 16] with a column per part of the input, for ranks that cut it."""
        target = self.compensation[expert, part.target]
        if part.name != "down_proj":
            return column_slot(name, target, part)
        step = part.size_in // _CHUNKS
        first, last = part.columns.start, part.columns.stop
        if part.size_in % _CHUNKS or first % step or last % step:
            raise CheckpointError(f"{name}: inputs {first} to {last} are not whole sixteenths")
        window = (part.rows, slice(first // step, last // step))

        def store(source: Tensor) -> None:
            target.copy_(source.sum(1))

        return windowed_slot(name, store, (part.size_out, _CHUNKS), window, FLOATS)

    def finish_loading(self) -> None:
        """Eight weights become one int32, and scales the bits that the device multiplies by."""
        self.weight = to_blocked_layout(self.weight, self._spec).view(torch.int32)
        self.scale = self.scale.view(torch.int32).to(torch.int64)
        # The grouped product has room for a scale of each of several groups of inputs.
        self.scale_of_one_group = self.scale[:, None]


class Int4Experts:
    """Two packed products.

    In the blocked layout the first one, the gated unit and the next quantization are one operator,
    and nothing is rounded to the model's type in between.
    """

    def __init__(self, spec: ModelSpec, shards: ExpertShards) -> None:
        self.shards = shards
        self.is_quantized = True
        count, hidden, width = len(shards.experts), shards.hidden, shards.width
        self.w13 = PackedMatrices(spec, count, hidden, 2 * width)
        self.w2 = PackedMatrices(spec, count, width, hidden)
        self._gated = self.w13.multiply_and_gate if spec.weight_nz_mode else self._gated_in_steps

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of the chosen experts [T, E]."""
        return weighted_sum(self, x, weights, experts)

    def multiply(self, rows: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        """Both products and the gated unit."""
        hidden, hidden_scales = self._gated(rows, scales, counts)
        return self.w2.multiply(hidden, hidden_scales, counts)

    def _gated_in_steps(
        self, rows: Tensor, scales: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for weights in the plain layout, which the operator for all does not take."""
        hidden = torch.ops.npu.npu_swiglu(self.w13.multiply(rows, scales, counts))
        quantized: tuple[Tensor, Tensor] = torch.ops.npu.npu_dynamic_quant(hidden)
        return quantized

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of each expert's three matrices."""
        for at, (gate, up, down) in enumerate(self.shards.matrices()):
            yield from self.w13.slots(at, *gate)
            yield from self.w13.slots(at, *up)
            yield from self.w2.slots(at, *down)

    def finish_loading(self) -> None:
        """Finish both products."""
        self.w13.finish_loading()
        self.w2.finish_loading()
