import pytest

from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.quant.scheme import Scheme
from services.worker.sizing.recipe import SchemeName, describe

MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "attention", "experts"),
    [
        ("w8a8", Scheme.W8A8, Scheme.W8A8_DYNAMIC),
        ("w8a8c8", Scheme.W8A8, Scheme.W8A8_DYNAMIC),
        ("w4a8c8", Scheme.W8A8_DYNAMIC, Scheme.W4A8_DYNAMIC),
    ],
)
def test_layers_have_the_types_of_the_published_recipes(
    glm: ModelConfig, name: SchemeName, attention: Scheme, experts: Scheme
) -> None:
    description = describe(glm, name)
    for layer in (0, 3, 6, 77):
        prefix = f"model.layers.{layer}."
        fused = ("q_a_proj", "kv_a_proj_with_mqa")
        assert description.scheme(f"{prefix}self_attn.", fused) is attention
        for part in ("q_b_proj", "o_proj"):
            assert description.scheme(f"{prefix}self_attn.", (part,)) is attention
        assert description.scheme(f"{prefix}self_attn.", ("kv_b_proj",)) is Scheme.FLOAT
    assert description.scheme("model.layers.6.self_attn.indexer.", ("wq_b",)) is attention
    float_parts = ("wk", "weights_proj")
    assert description.scheme("model.layers.6.self_attn.indexer.", float_parts) is Scheme.FLOAT
    dynamic = Scheme.W8A8_DYNAMIC
    assert description.scheme("model.layers.2.mlp.", MLP) is dynamic
    assert description.scheme("model.layers.3.mlp.shared_experts.", MLP) is dynamic
    assert description.scheme("model.layers.3.mlp.experts.0.", MLP) is experts
    assert description.scheme("model.layers.3.mlp.", ("gate",)) is Scheme.FLOAT
    assert description.scheme("", ("lm_head",)) is Scheme.FLOAT


def test_the_mtp_layer_stays_float_and_has_a_head_of_its_own(glm: ModelConfig) -> None:
    description = describe(glm, "w4a8c8")
    prefix = "model.layers.78."
    assert description.scheme(f"{prefix}mlp.experts.0.", MLP) is Scheme.FLOAT
    assert description.scheme(f"{prefix}self_attn.", ("o_proj",)) is Scheme.FLOAT
    assert description.scheme(prefix, ("eh_proj",)) is Scheme.FLOAT
    assert description.is_rot_used


def test_bfloat16_is_no_quantization(glm: ModelConfig) -> None:
    assert not describe(glm, "bf16").is_quantized


def test_eight_bit_keys_are_for_all_layers_that_have_any(glm: ModelConfig) -> None:
    cache = CacheFormat(sparse_li_c8=True)
    described = describe(glm, "w8a8c8").key_layers
    assert all(cache.has_c8_keys(layer, described) for layer in (0, 42, 74, 78))
