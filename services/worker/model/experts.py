"""Mixture of experts: a sigmoid router with correction bias, routed experts, a shared expert."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.model.config import ModelConfig
from services.worker.model.experts_int4 import Int4Experts
from services.worker.model.experts_int8 import Int8Experts
from services.worker.model.mlp import make_mlp
from services.worker.model.routed import ExpertShards, RoutedExperts, weighted_sum
from services.worker.model.shards import Shard
from services.worker.model.slots import WeightSlot, matrix_slot, plain_slot
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs
from services.worker.quant.scheme import Scheme
from shared.errors import CheckpointError


class Router:
    """Chooses experts per token; float32 throughout, whatever the model's type."""

    def __init__(self, config: ModelConfig, device: torch.device, prefix: str) -> None:
        self.config = config
        self._prefix = prefix
        shape = (config.hidden_size, config.n_routed_experts)
        self.weight = torch.empty(shape, dtype=torch.float32, device=device)
        self.e_score_correction_bias = torch.empty(shape[1:], dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights [T, k] float32 and experts [T, k] int32."""
        config = self.config
        weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
            torch.ops.glm.linear(x.float(), self.weight),
            config.num_experts_per_tok,
            bias=self.e_score_correction_bias,
            k_group=config.topk_group,
            group_count=config.n_group,
            group_select_mode=1,  # a group counts as the sum of its two best experts
            renorm=0,
            norm_type=1,  # sigmoid, and division by the sum of the chosen
            routed_scaling_factor=config.routed_scaling_factor,
            eps=1e-20,
        )
        return weights, experts

    def slots(self) -> Iterator[WeightSlot]:
        """The matrix and the correction bias, whole on every rank."""
        part = Shard.whole("", self.config.n_routed_experts, self.config.hidden_size)
        yield matrix_slot(f"{self._prefix}weight", self.weight.t(), part)
        bias = f"{self._prefix}e_score_correction_bias"
        yield plain_slot(bias, self.e_score_correction_bias)

    def finish_loading(self) -> None:
        """Put the matrix into the order in which it is read."""
        self.weight = torch.ops.glm.pack_weight(self.weight)


class MixtureOfExperts:
    """``sum_j weight_j * expert_j(x) + shared(x)``, both cut over the tensor-parallel ranks."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        config = spec.config
        self.gate = Router(config, spec.device, f"{prefix}gate.")
        self.experts = make_experts(spec, f"{prefix}experts.")
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = make_mlp(spec, f"{prefix}shared_experts.", width)
        self._beside = spec.beside

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """[.., E] -> [.., E] in the form of the stream."""
        x = step.stream.whole(x)
        shared = self._beside.start(self.shared_experts, x)
        weights, experts = self.gate(x)
        routed = self.experts(x, weights, experts)
        return step.stream.add_up(shared().add_(routed))

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this block."""
        yield from self.gate.slots()
        yield from self.experts.slots()
        yield from self.shared_experts.slots()

    def finish_loading(self) -> None:
        """Finish the router and the experts, routed and shared."""
        self.gate.finish_loading()
        self.experts.finish_loading()
        self.shared_experts.finish_loading()


def make_experts(spec: ModelSpec, prefix: str) -> RoutedExperts:
    """The routed experts of a layer in the form that their weights are stored in.

    The first expert tells for all: the grouped product has one type.
    """
    shards = ExpertShards.cut(spec, prefix)
    first = f"{prefix}0."
    scheme = spec.quantization.scheme(first, ("gate_proj", "up_proj", "down_proj"))
    if scheme is Scheme.FLOAT:
        return FloatExperts(spec, shards)
    if scheme is Scheme.W8A8_DYNAMIC:
        return Int8Experts(spec, shards)
    if scheme is Scheme.W4A8_DYNAMIC:
        return Int4Experts(spec, shards)
    raise CheckpointError(
        f"{spec.quantization.source}: {prefix}: {scheme} is not served for routed experts"
    )


class FloatExperts:
    """Experts in the model's type."""

    def __init__(self, spec: ModelSpec, shards: ExpertShards) -> None:
        self.shards = shards
        self.is_quantized = False
        # Input side first: the layout of the grouped product. Gate columns come before up's.
        count, hidden, width = len(shards.experts), shards.hidden, shards.width
        self.w13 = torch.empty((count, hidden, 2 * width), dtype=spec.dtype, device=spec.device)
        self.w2 = torch.empty((count, width, hidden), dtype=spec.dtype, device=spec.device)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of the chosen experts [T, E]."""
        return weighted_sum(self, x, weights, experts)

    def multiply(self, rows: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        """Both products and the gated unit."""
        hidden = torch.ops.npu.npu_swiglu(_grouped(rows, self.w13, counts))
        return _grouped(hidden, self.w2, counts)

    def slots(self) -> Iterator[WeightSlot]:
        """Three matrices of each expert."""
        for expert, w13, w2 in zip(self.shards.matrices(), self.w13, self.w2, strict=True):
            for (name, part), target in zip(expert, (w13, w13, w2), strict=True):
                yield matrix_slot(f"{name}weight", target[:, part.target].t(), part)

    def finish_loading(self) -> None:
        """Put the weights into the order in which they are read."""
        self.w13 = torch.ops.glm.pack_weight(self.w13)
        self.w2 = torch.ops.glm.pack_weight(self.w2)


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix."""
    product: Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )[0]
    return product
