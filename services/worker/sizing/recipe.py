"""Types of a quantized checkpoint that is not at hand, as ModelSlim's recipes for GLM set them.

A checkpoint's own description always wins; this one sizes a model whose weights are elsewhere.
"""

from collections.abc import Iterator
from typing import Final, Literal, get_args

from services.worker.model.config import ModelConfig
from services.worker.quant.scheme import QuantDescription, Scheme

SchemeName = Literal["bf16", "w8a8", "w8a8c8", "w4a8", "w4a8c8"]
SCHEMES: Final[tuple[SchemeName, ...]] = get_args(SchemeName)

# The `c8` recipes differ in how the caches were calibrated; weights have the same types.
_ATTENTION: Final = {"w8": Scheme.W8A8, "w4": Scheme.W8A8_DYNAMIC}
_EXPERTS: Final = {"w8": Scheme.W8A8_DYNAMIC, "w4": Scheme.W4A8_DYNAMIC}
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def describe(config: ModelConfig, scheme: SchemeName) -> QuantDescription:
    """The description of a checkpoint quantized by a recipe; the MTP layer stays float.

    Of a layer's experts it has the first, which tells for all.
    """
    if scheme == "bf16":
        return QuantDescription()
    bits = scheme[:2]
    types: dict[str, str] = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        types |= dict.fromkeys(_attention(config, layer, prefix), _ATTENTION[bits])
        types |= dict.fromkeys(_float_parts(prefix), Scheme.FLOAT)
        if not config.is_sparse(layer):
            types |= dict.fromkeys(_mlp(f"{prefix}mlp."), Scheme.W8A8_DYNAMIC)
            continue
        types |= dict.fromkeys(_mlp(f"{prefix}mlp.shared_experts."), Scheme.W8A8_DYNAMIC)
        types |= dict.fromkeys(_mlp(f"{prefix}mlp.experts.0."), _EXPERTS[bits])
    types |= dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight"), Scheme.FLOAT)
    types |= dict.fromkeys(_mtp(config), Scheme.FLOAT)
    # The recipes rotate, so the MTP layer has a head of its own.
    return QuantDescription(source=f"recipe {scheme}", types=types, is_rot_used=True)


def _attention(config: ModelConfig, layer: int, prefix: str) -> Iterator[str]:
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
        yield f"{prefix}self_attn.{name}.weight"
    if config.has_indexer(layer):
        yield f"{prefix}self_attn.indexer.wq_b.weight"


def _float_parts(prefix: str) -> Iterator[str]:
    for name in ("kv_b_proj", "indexer.wk", "indexer.weights_proj"):
        yield f"{prefix}self_attn.{name}.weight"
    yield f"{prefix}mlp.gate.weight"


def _mlp(prefix: str) -> Iterator[str]:
    for name in _MLP:
        yield f"{prefix}{name}.weight"


def _mtp(config: ModelConfig) -> Iterator[str]:
    layer = config.num_hidden_layers
    prefix = f"model.layers.{layer}."
    yield f"{prefix}eh_proj.weight"
    yield from _attention(config, layer, prefix)
    yield from _float_parts(prefix)
    yield from _mlp(f"{prefix}mlp.shared_experts.")
    yield from _mlp(f"{prefix}mlp.experts.0.")
