"""The tensors of the published BF16 checkpoint, written down from its inventory.

Independent of the model's code: names, shapes, and along which axis tensor-parallel ranks divide
each (None: every rank has all of it).
"""

from collections.abc import Iterator

HIDDEN, HEADS, EXPERTS, LAYERS = 6144, 64, 256, 78
FULL = {0, 1, 2, *range(6, 75, 4)}

Tensor = tuple[str, tuple[int, ...], int | None]


def tensors(*, layers: range, with_mtp: bool) -> Iterator[Tensor]:
    """Everything behind these layers; the first has the embeddings, the last the head."""
    if 0 in layers:
        yield "model.embed_tokens.weight", (154880, HIDDEN), 0
    for layer in layers:
        yield from _layer(layer)
    if LAYERS - 1 in layers:
        yield "model.norm.weight", (HIDDEN,), None
        yield "lm_head.weight", (154880, HIDDEN), 0
        if with_mtp:
            yield from _mtp()


def _layer(layer: int) -> Iterator[Tensor]:
    start = f"model.layers.{layer}."
    yield f"{start}input_layernorm.weight", (HIDDEN,), None
    yield f"{start}post_attention_layernorm.weight", (HIDDEN,), None
    attention = f"{start}self_attn."
    yield f"{attention}q_a_proj.weight", (2048, HIDDEN), None
    yield f"{attention}q_a_layernorm.weight", (2048,), None
    yield f"{attention}q_b_proj.weight", (HEADS * 256, 2048), 0
    yield f"{attention}kv_a_proj_with_mqa.weight", (576, HIDDEN), None
    yield f"{attention}kv_a_layernorm.weight", (512,), None
    yield f"{attention}kv_b_proj.weight", (HEADS * 448, 512), 0
    yield f"{attention}o_proj.weight", (HIDDEN, HEADS * 256), 1
    if layer in FULL or layer == LAYERS:
        yield f"{attention}indexer.wq_b.weight", (4096, 2048), None
        yield f"{attention}indexer.wk.weight", (128, HIDDEN), None
        yield f"{attention}indexer.k_norm.weight", (128,), None
        yield f"{attention}indexer.k_norm.bias", (128,), None
        yield f"{attention}indexer.weights_proj.weight", (32, HIDDEN), None
    mlp = f"{start}mlp."
    if layer < 3:
        yield from _gated(mlp, 12288)
        return
    yield f"{mlp}gate.weight", (EXPERTS, HIDDEN), None
    yield f"{mlp}gate.e_score_correction_bias", (EXPERTS,), None
    yield from _gated(f"{mlp}shared_experts.", 2048)
    for expert in range(EXPERTS):
        yield from _gated(f"{mlp}experts.{expert}.", 2048)


def _gated(start: str, width: int) -> Iterator[Tensor]:
    yield f"{start}gate_proj.weight", (width, HIDDEN), 0
    yield f"{start}up_proj.weight", (width, HIDDEN), 0
    yield f"{start}down_proj.weight", (HIDDEN, width), 1


def _mtp() -> Iterator[Tensor]:
    start = f"model.layers.{LAYERS}."
    yield f"{start}enorm.weight", (HIDDEN,), None
    yield f"{start}hnorm.weight", (HIDDEN,), None
    yield f"{start}eh_proj.weight", (HIDDEN, 2 * HIDDEN), None
    yield from _layer(LAYERS)
    yield f"{start}shared_head.norm.weight", (HIDDEN,), None
