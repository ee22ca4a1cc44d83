"""The whole model: embeddings, layers, final norm, head."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kv_cache import KVCaches
from services.worker.model.config import ModelConfig
from services.worker.model.layer import DecoderLayer
from services.worker.model.linear import Linear
from services.worker.model.metadata import StepMetadata
from services.worker.model.norm import RMSNorm
from services.worker.model.rope import RotaryTables
from services.worker.model.slots import WeightSlot, plain_slot, transposed_slot
from services.worker.model.step import StepInputs


class Embedding:
    """One row per token."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty((vocab_size, hidden_size), dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, E]."""
        return functional.embedding(token_ids, self.weight)


class Decoder:
    """GLM-5.2 for one rank. One thread calls it; it owns weights, never caches."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = [
            DecoderLayer(config, layer, dtype, device) for layer in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, device)
        self.rotary = RotaryTables(
            dim=config.qk_rope_head_dim,
            theta=config.rope_theta,
            max_positions=config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )

    @classmethod
    def build(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
    ) -> "Decoder":
        """A decoder with unset weights; `services.worker.weights` fills them."""
        return cls(config, dtype, torch.device(device))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, step: StepMetadata, caches: KVCaches) -> Tensor:
        """Run one step.

        Args:
            token_ids: [T] tokens of the step.
            step: Where they belong.
            caches: KV caches, written at the step's slots.

        Returns:
            [T, E] hidden states after the final norm.
        """
        assert token_ids.shape == (step.num_tokens,)
        inputs = StepInputs.prepare(step, self.rotary)
        x = self.embed_tokens(token_ids)
        residual: Tensor | None = None
        topk = x.new_empty(0)  # the first layer has an indexer and sets it
        for layer, cache in zip(self.layers, caches.layers, strict=False):
            x, residual, topk = layer(x, residual, inputs, cache, topk)
        assert residual is not None
        return self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] hidden states -> [S, V] float32 logits."""
        return self.lm_head(hidden).float()

    def slots(self) -> Iterator[WeightSlot]:
        """Every checkpoint tensor this decoder takes."""
        embeddings = plain_slot("model.embed_tokens.weight", self.embed_tokens.weight)
        head = transposed_slot("lm_head.weight", self.lm_head.weight)
        yield embeddings.also(head) if self.config.tie_word_embeddings else embeddings
        for index, layer in enumerate(self.layers):
            yield from layer.slots(f"model.layers.{index}.")
        yield plain_slot("model.norm.weight", self.norm.weight)
        if not self.config.tie_word_embeddings:
            yield head
