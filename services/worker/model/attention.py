"""Absorbed latent attention over selected positions.

The key half of ``kv_b_proj`` is multiplied into the query and its value half into the result, so
that attention runs in the C-wide latent space on the cached rows themselves. Prefill and decode
take the same path.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.kv_cache import LayerCache
from services.worker.model.indexer import Indexer
from services.worker.model.latent_cache import make_latent_cache
from services.worker.model.norm import RMSNorm
from services.worker.model.projections import check_is_float, make_projection
from services.worker.model.shards import Cut
from services.worker.model.slots import FLOATS, WeightSlot, plain_slot, windowed_slot
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs
from services.worker.model.token_cut import attended_tokens
from services.worker.ops.rules.dense import takes_batchmatmul

_BY_HEAD = [1, 0, 2]


class SparseLatentAttention:
    """Multi-head latent attention with an own or a shared selection of positions."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str) -> None:
        config = spec.config
        self.config = config
        self._prefix = prefix
        self._heads = spec.placement.head_share(config.num_attention_heads)
        self.num_heads = self._heads.stop - self._heads.start
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        # Both read the hidden state; every rank needs both latents whole.
        parts = {"q_a_proj": config.q_lora_rank, "kv_a_proj_with_mqa": latent + rope}
        self.fused_qkv_a_proj = make_projection(spec, prefix, parts, config.hidden_size)
        eps, dtype, device = config.latent_norm_eps, spec.dtype, spec.device
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, dtype, device)
        self.kv_a_layernorm = RMSNorm(latent, eps, dtype, device)
        self.latent_cache = make_latent_cache(spec, self.kv_a_layernorm)
        self._tokens = attended_tokens(spec, self.latent_cache)
        self.q_b_proj = make_projection(
            spec,
            prefix,
            {"q_b_proj": config.num_attention_heads * config.qk_head_dim},
            config.q_lora_rank,
            Cut.WHOLE if spec.placement.is_dsa_cp else Cut.OUTPUTS,
        )
        check_is_float(spec, prefix, "kv_b_proj")
        shape = (self.num_heads, config.qk_nope_head_dim, latent)
        self.W_UK_T = torch.empty(shape, dtype=dtype, device=device)
        shape = (self.num_heads, latent, config.v_head_dim)
        self.W_UV = torch.empty(shape, dtype=dtype, device=device)
        values = config.num_attention_heads * config.v_head_dim
        out = {"o_proj": config.hidden_size}
        self.o_proj = make_projection(spec, prefix, out, values, Cut.INPUTS)
        has_indexer = config.has_indexer(layer)
        self.indexer = Indexer(spec, layer, f"{prefix}indexer.") if has_indexer else None

    def __call__(
        self, x: Tensor, step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write, then attend.

        Args:
            x: [.., E] normalised hidden states in the form of the stream.
            step: The step.
            cache: This layer's caches, written at the step's slots.
            topk: [T, 1, K] positions of the nearest earlier layer with an indexer.

        Returns:
            [.., E] in the form of the stream, and the positions used, [T, 1, K].
        """
        return self.attend(self.write(x, step, cache), step, cache, topk)

    def write(self, x: Tensor, step: StepInputs, cache: LayerCache) -> tuple[Tensor, ...]:
        """Write the caches. Selection and attention come after: new tokens see themselves.

        Returns:
            What `attend` needs of each token: query latents [T, Q] before their norm, and with an
            own indexer its head weights [T, Hi].
        """
        config = self.config
        x = self._tokens.take(x, step)
        latents = self.fused_qkv_a_proj(x)
        rank = config.q_lora_rank
        width = config.kv_lora_rank + config.qk_rope_head_dim
        q_part, kv_part = latents.split_with_sizes([rank, width], 1)
        if self.indexer is None:
            self._tokens.write(kv_part, None, None, step, cache)
            return (q_part,)
        keys, weights = self.indexer.project(x, step)
        self._tokens.write(kv_part, keys, self.indexer.key_cache, step, cache)
        return q_part, weights

    def attend(
        self, queries: tuple[Tensor, ...], step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend with what `write` returned, or some rows of it and a step of those."""
        q_part, *weights = queries
        q_latent = self.q_a_layernorm(q_part)
        if self.indexer is not None:
            topk = self.indexer.select(q_latent, weights[0], step, cache)
        return step.stream.add_up(self._attend(q_latent, step, cache, topk)), topk

    def _attend(
        self, q_latent: Tensor, step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> Tensor:
        config = self.config
        queries = self.q_b_proj(q_latent).view(-1, self.num_heads, config.qk_head_dim)
        nope, rope = queries.split_with_sizes([config.qk_nope_head_dim, config.qk_rope_head_dim], 2)
        absorbed = _by_head(nope, self.W_UK_T)
        rotated = torch.ops.npu.npu_interleave_rope(rope.unsqueeze(2), step.cos, step.sin)
        attended = self.latent_cache.attend(absorbed, rotated.squeeze(2), step, cache, topk)
        values = _by_head(attended, self.W_UV)
        return self.o_proj(self._tokens.exchange(values))

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this block."""
        prefix, config = self._prefix, self.config
        yield from self.fused_qkv_a_proj.slots()
        yield plain_slot(f"{prefix}q_a_layernorm.weight", self.q_a_layernorm.weight)
        yield plain_slot(f"{prefix}kv_a_layernorm.weight", self.kv_a_layernorm.weight)
        yield from self.q_b_proj.slots()
        yield from self.o_proj.slots()
        head_rows = config.qk_nope_head_dim + config.v_head_dim
        rows = slice(self._heads.start * head_rows, self._heads.stop * head_rows)
        shape = (config.num_attention_heads * head_rows, config.kv_lora_rank)
        window = (rows, slice(0, config.kv_lora_rank))
        name = f"{prefix}kv_b_proj.weight"
        yield windowed_slot(name, self._store_kv_b, shape, window, FLOATS)
        if self.indexer is not None:
            yield from self.indexer.slots()

    def _store_kv_b(self, source: Tensor) -> None:
        """Split [H * (P + D), C] into the query side and the value side of the absorption."""
        config = self.config
        by_head = source.view(self.num_heads, -1, config.kv_lora_rank)
        keys, values = by_head.split_with_sizes([config.qk_nope_head_dim, config.v_head_dim], 1)
        self.W_UK_T.copy_(keys)
        self.W_UV.copy_(values.transpose(1, 2))

    def finish_loading(self) -> None:
        """Finish the products."""
        self.fused_qkv_a_proj.finish_loading()
        self.q_b_proj.finish_loading()
        self.o_proj.finish_loading()
        self.W_UK_T = torch.ops.glm.pack_weight(self.W_UK_T)
        self.W_UV = torch.ops.glm.pack_weight(self.W_UV)
        if self.indexer is not None:
            self.indexer.finish_loading()


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """``x[:, h] @ weight[h]``: [T, H, M] by [H, M, N] -> [T, H, N]."""
    product: Tensor
    if takes_batchmatmul(*weight.shape):
        product = torch.ops.npu.npu_transpose_batchmatmul(
            x, weight, perm_x1=_BY_HEAD, perm_y=_BY_HEAD
        )
    else:
        product = torch.ops.glm.head_matmul(x, weight)
    return product
