"""Types of a quantized checkpoint that is not at hand, as `glm-mesh quantize` would set them.

A checkpoint's own description always wins; this one sizes a model whose weights are elsewhere.
"""

from collections.abc import Iterator
from typing import Final, Literal

from services.worker.model.config import ModelConfig
from services.worker.quant.recipe import RECIPES, scheme_of
from services.worker.quant.scheme import QuantDescription

SchemeName = Literal["bf16", "w8a8", "w8a8c8", "w4a8c8"]

_ATTENTION: Final = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("indexer.wq_b", "indexer.wk", "indexer.weights_proj"),
)
_GATED: Final = ("gate_proj", "up_proj", "down_proj")
_MLPS: Final = ("mlp.", "mlp.shared_experts.", "mlp.experts.0.")


def describe(config: ModelConfig, scheme: SchemeName) -> QuantDescription:
    """The description of a checkpoint quantized by a recipe.

    Of a layer's experts it has the first, which tells for all, and of the keys of indexers nothing:
    eight-bit keys are then for all layers.
    """
    if scheme == "bf16":
        return QuantDescription()
    recipe = RECIPES[scheme]
    types = {name: scheme_of(recipe, config, name).value for name in _weights(config)}
    # Published checkpoints are rotated, so their MTP layer has a head of its own.
    return QuantDescription(source=f"recipe {scheme}", types=types, is_rot_used=True)


def _weights(config: ModelConfig) -> Iterator[str]:
    """Names of all matrices that a layer may have."""
    for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}."
        for name in _ATTENTION:
            yield f"{prefix}self_attn.{name}.weight"
        for mlp in _MLPS:
            for name in _GATED:
                yield f"{prefix}{mlp}{name}.weight"
        yield f"{prefix}mlp.gate.weight"
        yield f"{prefix}eh_proj.weight"
    yield "model.embed_tokens.weight"
    yield "lm_head.weight"
