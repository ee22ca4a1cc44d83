"""The indexer: which K positions of its sequence each token attends to.

Queries come from the normalised query latent, keys and head weights from the hidden state. Keys
are cached for every token of a layer that has an indexer, whatever the selection needs: a later
token may score them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.kv_cache import LayerCache
from services.worker.model.key_cache import make_key_cache
from services.worker.model.projections import make_float_projection, make_projection
from services.worker.model.slots import WeightSlot, plain_slot
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs

_KEY_NORM_EPSILON = 1e-6  # fixed in transformers, vLLM and the release; no config key


class KeyNorm:
    """LayerNorm with bias over one key."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `x` [T, Di]."""
        normed: Tensor = torch.ops.glm.layer_norm(x, self.weight, self.bias, _KEY_NORM_EPSILON)
        return normed


class Indexer:
    """Scores cached keys for each token and selects the best K."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str) -> None:
        config = spec.config
        self._prefix = prefix
        self.num_heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        queries = {"wq_b": self.num_heads * self.head_dim}
        self.wq_b = make_projection(spec, prefix, queries, config.q_lora_rank)
        # Both read the hidden state. Scale factors that are the same for every position (Di^-0.5,
        # Hi^-0.5) are left out, they cannot change the selection.
        parts = {"wk": self.head_dim, "weights_proj": self.num_heads}
        self.wk_weights_proj = make_float_projection(spec, prefix, parts, config.hidden_size)
        self.k_norm = KeyNorm(self.head_dim, spec.dtype, spec.device)
        self.key_cache = make_key_cache(spec, layer)

    def project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Keys [T, Di] to be cached and head weights [T, Hi] of normalised hidden states [T, E]."""
        keys, weights = self.wk_weights_proj(x).split_with_sizes([self.head_dim, self.num_heads], 1)
        return self._rotate(self.k_norm(keys).unsqueeze(1), step).squeeze(1), weights

    def select(
        self, q_latent: Tensor, weights: Tensor, step: StepInputs, cache: LayerCache
    ) -> Tensor:
        """Select, once the step's keys are in the cache.

        Args:
            q_latent: [T, Q] normalised query latent.
            weights: [T, Hi] head weights.
            step: The step.
            cache: This layer's caches.

        Returns:
            [T, 1, K] int32 positions, -1 behind the valid ones.
        """
        queries = self.wq_b(q_latent).view(-1, self.num_heads, self.head_dim)
        return self.key_cache.select(self._rotate(queries, step), weights, step, cache)

    def _rotate(self, x: Tensor, step: StepInputs) -> Tensor:
        """Rotate the first 64 lanes of `x` [T, heads, Di] in place."""
        lanes = x[..., : self.rope_dim]
        rotated = torch.ops.npu.npu_interleave_rope(lanes.unsqueeze(2), step.cos, step.sin)
        lanes.copy_(rotated.squeeze(2))
        return x

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this block."""
        yield from self.wq_b.slots()
        yield from self.wk_weights_proj.slots()
        yield plain_slot(f"{self._prefix}k_norm.weight", self.k_norm.weight)
        yield plain_slot(f"{self._prefix}k_norm.bias", self.k_norm.bias)

    def finish_loading(self) -> None:
        """Finish the products."""
        self.wq_b.finish_loading()
        self.wk_weights_proj.finish_loading()
        self.key_cache.finish_loading()
