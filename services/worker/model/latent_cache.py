"""Writing and reading the latent cache of one layer, plain or packed.

A plain cache keeps latents and rotated keys in the model's type; a packed one (SFA C8) keeps both
in one row of 656 bytes, with a scale for each 128 latents.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.worker.kv_cache import SCALE_TILE, LayerCache, packed_width
from services.worker.model.norm import RMSNorm
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs


class LatentCache(Protocol):
    """How a layer's latents are kept, and how they are attended to."""

    def write(self, kv: Tensor, step: StepInputs, cache: LayerCache) -> None:
        """Norm, rotate and keep `kv` [T, C + Dr] at the step's slots."""
        ...

    def rows(self, kv: Tensor, step: StepInputs) -> Sequence[Tensor]:
        """What `write` would keep of `kv`, as rows [T, N] that travel."""
        ...

    def store(self, rows: Sequence[Tensor], slots: Tensor, cache: LayerCache) -> None:
        """Keep such rows at `slots`."""
        ...

    def attend(
        self, absorbed: Tensor, rotated: Tensor, step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> Tensor:
        """Attend with queries [T, H, C] and [T, H, Dr] to the positions `topk`: [T, H, C]."""
        ...


def make_latent_cache(spec: ModelSpec, norm: RMSNorm) -> LatentCache:
    """The form that the spec asks for; `norm` is that of the latent."""
    return (PackedLatentCache if spec.cache.sparse_sfa_c8 else PlainLatentCache)(spec, norm)


class PlainLatentCache:
    """Latents and rotated keys in caches of their own, in the model's type."""

    def __init__(self, spec: ModelSpec, norm: RMSNorm) -> None:
        self._norm = norm
        self._sizes = [spec.config.kv_lora_rank, spec.config.qk_rope_head_dim]
        self._scale = spec.config.softmax_scale

    def write(self, kv: Tensor, step: StepInputs, cache: LayerCache) -> None:
        """Everything in one operator."""
        torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(
            kv.view(-1, 1, 1, sum(self._sizes)),
            self._norm.weight,
            step.cos,
            step.sin,
            step.slots,
            cache.rope,
            cache.latent,
            epsilon=self._norm.epsilon,
            cache_mode="PA",
        )

    def rows(self, kv: Tensor, step: StepInputs) -> Sequence[Tensor]:
        """Latents and rotated keys."""
        latent, rope = kv.split_with_sizes(self._sizes, 1)
        return self._norm(latent), _rotate(rope, step).flatten(1)

    def store(self, rows: Sequence[Tensor], slots: Tensor, cache: LayerCache) -> None:
        """Two scatters."""
        assert cache.rope is not None
        for part, target, width in zip(rows, (cache.latent, cache.rope), self._sizes, strict=True):
            torch.ops.npu.npu_scatter_nd_update_(target.view(-1, width), slots.view(-1, 1), part)

    def attend(
        self, absorbed: Tensor, rotated: Tensor, step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> Tensor:
        """Attend on the cached rows themselves."""
        attended: Tensor = torch.ops.npu.npu_sparse_flash_attention(
            absorbed,
            cache.latent,
            cache.latent,
            topk,
            self._scale,
            block_table=step.block_table,
            actual_seq_lengths_query=step.cum_query_lens,
            actual_seq_lengths_kv=step.seq_lens,
            query_rope=rotated,
            key_rope=cache.rope,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            attention_mode=2,  # absorbed MLA; the schema's default of 0 is refused by the kernel
        )[0]
        return attended


class PackedLatentCache:
    """Rows of 656 bytes: C latents in eight bits, Dr rotary lanes in bfloat16, float32 scales.

    In a float32 model the rotary lanes lose what bfloat16 cannot hold: the row has no room for it.
    """

    def __init__(self, spec: ModelSpec, norm: RMSNorm) -> None:
        self._norm = norm
        self._sizes = [spec.config.kv_lora_rank, spec.config.qk_rope_head_dim]
        self._type = spec.cache.eight_bit_type
        self._row_bytes = packed_width(spec)
        self._scale = spec.config.softmax_scale

    def write(self, kv: Tensor, step: StepInputs, cache: LayerCache) -> None:
        """Put a token's row together, then write it whole."""
        self.store(self.rows(kv, step), step.slots, cache)

    def rows(self, kv: Tensor, step: StepInputs) -> Sequence[Tensor]:
        """Packed rows."""
        latent, rope = kv.split_with_sizes(self._sizes, 1)
        lanes, scales = torch.ops.npu.npu_dynamic_block_quant(
            self._norm(latent).view(-1, 1, self._sizes[0]),
            dst_type=self._type,
            row_block_size=1,
            col_block_size=SCALE_TILE,
        )
        parts = (lanes, _rotate(rope, step).to(torch.bfloat16), scales)
        return (torch.cat([part.flatten(1).view(torch.int8) for part in parts], 1),)

    def store(self, rows: Sequence[Tensor], slots: Tensor, cache: LayerCache) -> None:
        """One scatter of whole rows."""
        target = cache.latent.view(torch.int8).view(-1, self._row_bytes)
        torch.ops.npu.npu_scatter_nd_update_(target, slots.view(-1, 1), rows[0])

    def attend(
        self, absorbed: Tensor, rotated: Tensor, step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> Tensor:
        """Attend on packed rows; both halves of a query travel as one."""
        attended: Tensor = torch.ops.npu.npu_kv_quant_sparse_flash_attention(
            torch.cat((absorbed, rotated), 2),
            cache.latent,
            cache.latent,
            topk,
            self._scale,
            key_quant_mode=2,  # a scale per tile; the other modes are not the kernel's
            value_quant_mode=2,
            block_table=step.block_table,
            actual_seq_lengths_query=step.cum_query_lens,
            actual_seq_lengths_kv=step.seq_lens,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            attention_mode=2,
            quant_scale_repo_mode=1,  # scales lie in the rows
            tile_size=SCALE_TILE,
            rope_head_dim=self._sizes[1],
        )
        return attended


def _rotate(rope: Tensor, step: StepInputs) -> Tensor:
    """Rotated keys [T, 1, 1, Dr] of `rope` [T, Dr]."""
    lanes = rope.view(-1, 1, 1, rope.shape[1])
    rotated: Tensor = torch.ops.npu.npu_interleave_rope(lanes, step.cos, step.sin)
    return rotated
