"""The gated MLP: ``down(silu(gate(x)) * up(x))``; gate and up are one product, gate first."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from services.worker.model.linear import Projection
from services.worker.model.linear_int8 import DynamicInt8Linear
from services.worker.model.projections import make_projection
from services.worker.model.shards import Cut
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from services.worker.ops.rules.moe_quant import takes_gated_sums


class MLP(Protocol):
    """A gated MLP however its weights are stored."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]; a rank's share of it where the width is cut."""
        ...

    def slots(self) -> Iterator[WeightSlot]:
        """Its checkpoint tensors."""
        ...

    def finish_loading(self) -> None:
        """Bring loaded weights into the form that the products want."""
        ...


def make_mlp(spec: ModelSpec, prefix: str, width: int, *, is_whole: bool = False) -> MLP:
    """A gated MLP of `width` inner columns, cut over the tensor-parallel ranks or whole."""
    if is_whole:
        spec = replace(spec, placement=replace(spec.placement, tp_size=1, tp_rank=0))
    hidden = spec.config.hidden_size
    parts = {"gate_proj": width, "up_proj": width}
    gate_up = make_projection(spec, prefix, parts, hidden, Cut.OUTPUTS)
    down = make_projection(spec, prefix, {"down_proj": hidden}, width, Cut.INPUTS)
    is_taken = takes_gated_sums(spec.placement.largest_share(width))
    if is_taken and isinstance(gate_up, DynamicInt8Linear) and isinstance(down, DynamicInt8Linear):
        return DynamicInt8MLP(gate_up, down)
    return GatedMLP(gate_up, down)


class GatedMLP:
    """Two products with the gated unit between them."""

    def __init__(self, gate_up_proj: Projection, down_proj: Projection) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        return self.down_proj(torch.ops.npu.npu_swiglu(self.gate_up_proj(x)))

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of both products."""
        yield from self.gate_up_proj.slots()
        yield from self.down_proj.slots()

    def finish_loading(self) -> None:
        """Finish both products."""
        self.gate_up_proj.finish_loading()
        self.down_proj.finish_loading()


class DynamicInt8MLP:
    """Both products in int8: the gated unit reads the first one's integer sums.

    The sums are scaled, gated and quantized again by one operator, so that nothing is rounded to
    the model's type in between.
    """

    def __init__(self, gate_up_proj: DynamicInt8Linear, down_proj: DynamicInt8Linear) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        gate_up = self.gate_up_proj
        quantized, scales = torch.ops.npu.npu_dynamic_quant(x)
        sums = torch.ops.npu.npu_quant_matmul(
            quantized, gate_up.weight, gate_up.weight_scale, output_dtype=torch.int32
        )
        hidden, hidden_scales = torch.ops.npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=gate_up.weight_scale,
            activation_scale=scales,
            activate_left=True,
            quant_mode=1,  # a scale per row, found from the row
        )
        return self.down_proj.multiply(hidden, hidden_scales)

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of both products."""
        yield from self.gate_up_proj.slots()
        yield from self.down_proj.slots()

    def finish_loading(self) -> None:
        """Finish both products."""
        self.gate_up_proj.finish_loading()
        self.down_proj.finish_loading()
