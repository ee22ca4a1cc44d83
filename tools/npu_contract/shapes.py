"""Sizes and types of what each device operator gives in a step, from the model's sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.worker.model.spec import ModelSpec
from services.worker.parallel.moe_method import MoeMethod

BF16, F32, I8, I32, I64 = torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64

Shape = tuple[tuple[int, ...], torch.dtype]
Results = tuple[Shape | None, ...]
"""Of one call; None for a result that a device leaves undefined in our mode."""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Sizes of a rank's part of a step of `tokens` tokens."""

    spec: ModelSpec
    method: MoeMethod
    tokens: int

    def expected(self) -> Mapping[str, Sequence[Results]]:
        """For each operator, the results that its calls may have.

        The LSE of the paged attention, whose shape is wrong in the wheel (it takes the block size
        for the number of KV heads), is not asked for.
        """
        config = self.spec.config
        tokens, stream = self._attended, self._stream
        topk: Results = (((tokens, 1, config.index_topk), I32),)
        heads, latent, eight = self._heads, config.kv_lora_rank, self.spec.cache.eight_bit_type
        hidden = ((stream, config.hidden_size), BF16)
        norms = [(stream, config.hidden_size), (tokens, config.q_lora_rank), (tokens, latent)]
        routed = ((self._routed, config.hidden_size), BF16)
        chosen = (self._routed, config.num_experts_per_tok)
        return {
            "npu_rms_norm": [((shape, BF16), None) for shape in norms],
            "npu_add_rms_norm": [(hidden, None, hidden)],
            "npu_kv_rmsnorm_rope_cache_v2": [(None, None)],
            "npu_dynamic_block_quant": [
                (((tokens, 1, latent), eight), ((tokens, 1, latent // 128), F32))
            ],
            "npu_interleave_rope": [
                (((tokens, count, 1, 64), BF16),) for count in (heads, config.index_n_heads, 1)
            ],
            "npu_lightning_indexer": [(*topk, None)],
            "npu_quant_lightning_indexer": [topk],
            "npu_transpose_batchmatmul": [
                (((tokens, heads, size), BF16),) for size in (latent, config.v_head_dim)
            ],
            "npu_sparse_flash_attention": [(((tokens, heads, latent), BF16), None, None)],
            "npu_kv_quant_sparse_flash_attention": [(((tokens, heads, latent), BF16),)],
            "npu_moe_gating_top_k": [((chosen, F32), (chosen, I32), None)],
            "npu_moe_token_unpermute": [(routed,), (self._gathered,)],
            "npu_moe_distribute_combine_v2": [(routed,)],
            **dict(self._products()),
            **dict(self._expert_products()),
        }

    @property
    def _share(self) -> int:
        """Tokens of a rank that cuts them."""
        return -(-self.tokens // self.spec.placement.tp_size)

    @property
    def _stream(self) -> int:
        """Tokens between blocks."""
        return self._share if self.spec.placement.is_flashcomm else self.tokens

    @property
    def _attended(self) -> int:
        """Tokens that the rank attends for."""
        return self._share if self.spec.placement.is_dsa_cp else self.tokens

    @property
    def _keeps_share(self) -> bool:
        """Whether the ways to experts begin and end with a share of the tokens."""
        return self.spec.placement.has_whole_shared_experts

    @property
    def _heads(self) -> int:
        share = self.spec.placement.head_share(self.spec.config.num_attention_heads)
        return _length(share)

    @property
    def _replicas(self) -> int:
        return max(1, self.spec.placement.ep_size // self.spec.placement.tp_size)

    @property
    def _routed(self) -> int:
        """Tokens that the router of this rank sees: its part of them if each rank sends its own."""
        is_sent = self.spec.placement.ep_size > 1 and self.method is not MoeMethod.ALLGATHER
        return self._share if is_sent or self._keeps_share else self.tokens

    @property
    def _gathered(self) -> Shape:
        """Sums for the tokens of all replicas."""
        return (self._routed * self._gatherers, self.spec.config.hidden_size), BF16

    @property
    def _gatherers(self) -> int:
        """Ranks whose tokens a rank sees, which have as many each."""
        return self.spec.placement.ep_size if self._keeps_share else self._replicas

    @property
    def _num_experts(self) -> int:
        return len(self.spec.placement.experts(self.spec.config.n_routed_experts))

    @property
    def _rows(self) -> int:
        """Rows that this rank's experts multiply."""
        config, placement = self.spec.config, self.spec.placement
        copies = self._routed * config.num_experts_per_tok
        if placement.ep_size == 1 or self.method is MoeMethod.ALLGATHER:
            return copies * self._gatherers
        if self.method is MoeMethod.MC2:  # room for the worst case
            nearest = min(self._num_experts, config.num_experts_per_tok)
            return self._routed * placement.ep_size * nearest
        # As evenly over the experts as `ShapeGroup` spreads them.
        part, rest = divmod(copies, config.n_routed_experts)
        experts = placement.experts(config.n_routed_experts)
        return placement.ep_size * sum(part + (expert < rest) for expert in experts)

    @property
    def _expert_width(self) -> int:
        share = self.spec.placement.expert_share(self.spec.config.moe_intermediate_size)
        return _length(share)

    def _mlps(self) -> list[tuple[int, int]]:
        """Tokens and width of dense layers and of shared experts."""
        config, size = self.spec.config, self.spec.placement.tp_size
        shared = config.moe_intermediate_size * config.n_shared_experts
        dense = (self.tokens, config.intermediate_size // size)
        return [
            dense,
            (self._share, shared) if self._keeps_share else (self.tokens, shared // size),
        ]

    def _inputs(self) -> list[tuple[int, int]]:
        """Rows and width of what products outside the routed experts multiply."""
        config, placement, tokens = self.spec.config, self.spec.placement, self._attended
        latents = [(tokens, config.hidden_size), (tokens, config.q_lora_rank)]
        mlps = self._mlps()
        blocks = [(rows, config.hidden_size) for rows, _ in mlps]
        # Behind the exchange of a rank that cuts tokens are the rows of all ranks.
        rows = tokens * (placement.tp_size if placement.is_dsa_cp else 1)
        values = config.num_attention_heads // placement.tp_size * config.v_head_dim
        return [*latents, *blocks, *mlps, (rows, values)]

    def _products(self) -> Iterator[tuple[str, list[Results]]]:
        config, tokens = self.spec.config, self._attended
        yield "npu_quantize", [((shape, I8),) for shape in self._inputs()]
        keys = [(rows, config.index_head_dim) for rows in (tokens, tokens * config.index_n_heads)]
        kinds = [(shape, I8) for shape in (*self._inputs(), (self._rows, self._expert_width))]
        kinds += [(shape, self.spec.cache.eight_bit_type) for shape in keys]
        yield "npu_dynamic_quant", [((shape, kind), (shape[:1], F32)) for shape, kind in kinds]
        latents = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
        queries = (self._heads * config.qk_head_dim, config.index_n_heads * config.index_head_dim)
        gated = [(rows, 2 * width) for rows, width in self._mlps()]
        sizes = [*((tokens, size) for size in (latents, *queries)), *gated]
        sizes += [(rows, config.hidden_size) for rows, _ in (*self._mlps(), self._inputs()[-1])]
        sums: list[Results] = [((shape, I32),) for shape in gated]
        yield "npu_quant_matmul", [*(((size, BF16),) for size in sizes), *sums]
        halves = [*self._mlps(), (self._rows, self._expert_width)]
        yield "npu_swiglu", [((shape, BF16),) for shape in halves]
        yield "npu_dequant_swiglu_quant", [((shape, I8), (shape[:1], F32)) for shape in halves]

    def _expert_products(self) -> Iterator[tuple[str, list[Results]]]:
        rows, width = self._rows, self._expert_width
        hidden = (rows, self.spec.config.hidden_size)
        yield "npu_moe_init_routing_v2", list(self._sorted())
        # Only the first of the three counts of what is where has a use for the model.
        sent = (((self._num_experts,), I64), None, None, None)
        yield (
            "npu_moe_distribute_dispatch_v2",
            [
                ((hidden, BF16), None, None, *sent),
                ((hidden, I8), ((rows,), F32), None, *sent),
            ],
        )
        products = [((rows, 2 * width), BF16), (hidden, BF16), ((rows, 2 * width), I32)]
        yield "npu_grouped_matmul", [(product,) for product in products]
        fused = (((rows, width), I8), ((rows,), F32))
        yield "npu_grouped_matmul_swiglu_quant_v2", [fused]

    def _sorted(self) -> Iterator[Results]:
        """Copies of tokens by expert: to be multiplied, or to be sent to all of the experts."""
        config, sent = self.spec.config, self._routed * self.spec.config.num_experts_per_tok
        for rows, experts in ((self._rows, self._num_experts), (sent, config.n_routed_experts)):
            shape, rest = (rows, config.hidden_size), (((rows,), I32), ((experts,), I64))
            yield ((shape, BF16), *rest, None)
            yield ((shape, I8), *rest, ((rows,), F32))


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def find_wrong_shape(
    expected: Mapping[str, Sequence[Results]], operator: str, results: Sequence[torch.Tensor]
) -> str:
    """What is wrong with the results of a call; empty when nothing is."""
    found = [(tuple(result.shape), result.dtype) for result in results]
    for wanted in expected[operator]:
        if len(wanted) == len(found) and all(
            due is None or due == got for due, got in zip(wanted, found, strict=True)
        ):
            return ""
    return f"{operator} gives {found}, must be one of {list(expected[operator])}"
