"""One decoder layer: attention and MLP around a running residual."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.kv_cache import LayerCache
from services.worker.model.backends import attention_backend
from services.worker.model.config import ModelConfig
from services.worker.model.experts import MixtureOfExperts
from services.worker.model.linear import GatedMLP
from services.worker.model.norm import RMSNorm
from services.worker.model.slots import WeightSlot, plain_slot
from services.worker.model.step import StepInputs


class DecoderLayer:
    """Pre-norm layer; the sum of block output and residual is taken inside the next norm."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype, device)
        self.self_attn = attention_backend(config)(config, layer, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype, device)
        self.mlp: MixtureOfExperts | GatedMLP = (
            MixtureOfExperts(config, dtype, device)
            if config.is_sparse(layer)
            else GatedMLP(hidden, config.intermediate_size, dtype, device)
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer.

        Args:
            x: [T, E] output of the layer before (embeddings at first).
            residual: [T, E] running sum without `x`; None at first.
            step: The step.
            cache: This layer's caches, written.
            topk: [T, 1, K] positions selected so far in this step.

        Returns:
            Block output, residual and selected positions for the next layer.
        """
        if residual is None:
            normed, residual = self.input_layernorm(x), x
        else:
            normed, residual = self.input_layernorm.add(x, residual)
        attended, topk = self.self_attn(normed, step, cache, topk)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual, topk

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this layer."""
        yield plain_slot(f"{prefix}input_layernorm.weight", self.input_layernorm.weight)
        yield from self.self_attn.slots(f"{prefix}self_attn.")
        yield plain_slot(
            f"{prefix}post_attention_layernorm.weight", self.post_attention_layernorm.weight
        )
        yield from self.mlp.slots(f"{prefix}mlp.")
