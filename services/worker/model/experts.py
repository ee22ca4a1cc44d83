"""Mixture of experts: a sigmoid router with correction bias, routed experts, a shared expert."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.model.config import ModelConfig
from services.worker.model.linear import GatedMLP
from services.worker.model.slots import WeightSlot, plain_slot, transposed_slot


class Router:
    """Chooses experts per token; float32 throughout, whatever the model's type."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
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


class MixtureOfExperts:
    """``sum_j weight_j * expert_j(x) + shared(x)``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        experts, hidden = config.n_routed_experts, config.hidden_size
        width = config.moe_intermediate_size
        self.gate = Router(config, device)
        # Input side first: the layout of the grouped product. Gate columns come before up's.
        self.w13 = torch.empty((experts, hidden, 2 * width), dtype=dtype, device=device)
        self.w2 = torch.empty((experts, width, hidden), dtype=dtype, device=device)
        self.shared_experts = GatedMLP(hidden, width * config.n_shared_experts, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        weights, experts = self.gate(x)
        rows, order, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x,
            experts,
            active_num=experts.numel(),
            expert_num=self.config.n_routed_experts,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, self.config.n_routed_experts],
            quant_mode=-1,
        )
        hidden = torch.ops.npu.npu_swiglu(_grouped(rows, self.w13, counts))
        routed = torch.ops.npu.npu_moe_token_unpermute(
            _grouped(hidden, self.w2, counts), order, weights.to(x.dtype)
        )
        return self.shared_experts(x).add_(routed)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this block."""
        gate = self.gate
        yield transposed_slot(f"{prefix}gate.weight", gate.weight)
        yield plain_slot(f"{prefix}gate.e_score_correction_bias", gate.e_score_correction_bias)
        width = self.config.moe_intermediate_size
        for expert in range(self.config.n_routed_experts):
            name = f"{prefix}experts.{expert}."
            w13, w2 = self.w13[expert], self.w2[expert]
            yield transposed_slot(f"{name}gate_proj.weight", w13[:, :width])
            yield transposed_slot(f"{name}up_proj.weight", w13[:, width:])
            yield transposed_slot(f"{name}down_proj.weight", w2)
        yield from self.shared_experts.slots(f"{prefix}shared_experts.")


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix."""
    product: Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )[0]
    return product
