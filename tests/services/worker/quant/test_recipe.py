"""Which matrices a scheme quantizes."""

from typing import Any

import pytest

from services.worker.model.config import ModelConfig
from services.worker.quant.recipe import RECIPES, default_whole_layers, layer_of, scheme_of
from services.worker.quant.scheme import Scheme

# model.layers.<layer>.<rest>.weight -> schemes of w8a8 and w4a8c8
QUANTIZED = {
    "self_attn.q_a_proj": ("W8A8", "W8A8_DYNAMIC"),
    "self_attn.kv_a_proj_with_mqa": ("W8A8", "W8A8_DYNAMIC"),
    "self_attn.q_b_proj": ("W8A8", "W8A8_DYNAMIC"),
    "self_attn.o_proj": ("W8A8", "W8A8_DYNAMIC"),
    "self_attn.indexer.wq_b": ("W8A8", "W8A8_DYNAMIC"),
    "mlp.gate_proj": ("W8A8_DYNAMIC", "W8A8_DYNAMIC"),
    "mlp.down_proj": ("W8A8_DYNAMIC", "W8A8_DYNAMIC"),
    "mlp.shared_experts.up_proj": ("W8A8_DYNAMIC", "W8A8_DYNAMIC"),
    "mlp.experts.17.up_proj": ("W8A8_DYNAMIC", "W4A8_DYNAMIC"),
    "mlp.experts.0.down_proj": ("W8A8_DYNAMIC", "W4A8_DYNAMIC"),
}
FLOAT = (
    "self_attn.kv_b_proj",
    "self_attn.indexer.wk",
    "self_attn.indexer.weights_proj",
    "self_attn.indexer.k_norm",
    "self_attn.q_a_layernorm",
    "mlp.gate",
    "input_layernorm",
)


@pytest.fixture
def config(tiny_values: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})


@pytest.mark.parametrize("rest", QUANTIZED)
def test_products_are_quantized_by_their_part(config: ModelConfig, rest: str) -> None:
    name = f"model.layers.3.{rest}.weight"
    found = tuple(scheme_of(RECIPES[key], config, name) for key in ("w8a8", "w4a8c8"))
    assert found == QUANTIZED[rest]
    assert scheme_of(RECIPES["w8a8c8"], config, name) == QUANTIZED[rest][0]


@pytest.mark.parametrize("rest", FLOAT)
def test_what_needs_its_digits_stays_float(config: ModelConfig, rest: str) -> None:
    for recipe in RECIPES.values():
        assert scheme_of(recipe, config, f"model.layers.3.{rest}.weight") is Scheme.FLOAT


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
)
def test_embeddings_norm_and_head_stay_float(config: ModelConfig, name: str) -> None:
    assert scheme_of(RECIPES["w4a8c8"], config, name) is Scheme.FLOAT


def test_the_mtp_layer_stays_float(config: ModelConfig) -> None:
    for rest in (*QUANTIZED, "eh_proj"):
        name = f"model.layers.4.{rest}.weight"
        assert scheme_of(RECIPES["w4a8c8"], config, name) is Scheme.FLOAT


def test_only_static_scales_need_calibration() -> None:
    assert [RECIPES[key].needs_calibration for key in ("w8a8", "w8a8c8", "w4a8c8")] == [
        True,
        True,
        False,
    ]
    assert RECIPES["w4a8c8"].uses_calibration
    assert [RECIPES[key].has_c8 for key in ("w8a8", "w8a8c8", "w4a8c8")] == [False, True, True]


def test_tensors_know_their_layer() -> None:
    assert layer_of("model.layers.12.mlp.gate.weight") == 12
    assert layer_of("model.norm.weight") is None


def test_the_ends_of_a_deep_model_keep_their_keys(tiny_values: dict[str, Any]) -> None:
    deep = {"num_hidden_layers": 78, "indexer_types": ["full"] * 78, "mlp_layer_types": None}
    glm = ModelConfig.from_dict(tiny_values | deep | {"num_nextn_predict_layers": 1})
    assert default_whole_layers(glm) == {*range(5), *range(74, 79)}


def test_a_shallow_model_has_no_ends(config: ModelConfig) -> None:
    assert default_whole_layers(config) == frozenset()
