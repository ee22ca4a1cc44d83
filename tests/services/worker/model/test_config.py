"""config.json becomes a typed value, or an error that names field and value."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.model.config import _INTEGERS, ModelConfig
from shared.errors import ConfigError


def test_a_release_like_config_is_read(tmp_path: Path, tiny_values: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_values))
    config = ModelConfig.from_dir(tmp_path)
    assert config.indexer_types == ("full", "shared", "full", "shared")
    assert config.mlp_layer_types == ("dense", "sparse", "sparse", "sparse")
    assert config.eos_token_ids == (1, 2)
    assert config.rope_theta == 10000.0
    assert config.qk_head_dim == 96
    assert config.softmax_scale == pytest.approx(96**-0.5)


def test_latent_epsilon_is_its_own_key_and_defaults_to_the_norm_epsilon(
    tiny_values: dict[str, Any],
) -> None:
    assert ModelConfig.from_dict(tiny_values).latent_norm_eps == 1e-6
    del tiny_values["latent_norm_eps"]
    assert ModelConfig.from_dict(tiny_values).latent_norm_eps == 1e-5


def test_the_frequency_rule_gives_the_release_layers(tiny_values: dict[str, Any]) -> None:
    del tiny_values["indexer_types"]
    config = ModelConfig.from_dict(
        tiny_values | {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    )
    full = [layer for layer in range(78) if config.has_indexer(layer)]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert config.has_indexer(78)  # the MTP layer always selects for itself
    assert config.is_sparse(78)


def test_the_pattern_wins_over_the_frequency_rule(tiny_values: dict[str, Any]) -> None:
    del tiny_values["indexer_types"]
    values = tiny_values | {"index_topk_pattern": "FFSF", "index_topk_freq": 4}
    assert ModelConfig.from_dict(values).indexer_types == ("full", "full", "shared", "full")


def test_mlp_types_are_taken_from_the_list_when_there_is_one(tiny_values: dict[str, Any]) -> None:
    listed = ["dense", "dense", "sparse", "dense"]
    config = ModelConfig.from_dict(tiny_values | {"mlp_layer_types": listed})
    assert config.mlp_layer_types == tuple(listed)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"kv_lora_rank": 256}, "kv_lora_rank=256"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim=32"),
        ({"index_head_dim": 64}, "index_head_dim=64"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads=6"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"index_n_heads": 128}, "index_n_heads=128"),
        ({"n_group": 3}, "n_group=3"),
        ({"n_group": 8, "topk_group": 4}, "n_group=8"),
        ({"topk_group": 2}, "topk_group=2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ({"indexer_types": ["full"]}, "indexer_types='1 entries'"),
        ({"indexer_types": ["full", "some", "full", "full"]}, r"indexer_types\[1\]='some'"),
        ({"indexer_types": ["shared"] * 4}, r"indexer_types\[0\]='shared'"),
        ({"indexer_types": "full"}, "indexer_types='full'"),
        ({"indexer_types": None, "index_topk_pattern": "FXFF"}, "index_topk_pattern='FXFF'"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave=False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8' are not served"),
        ({"quantization_config": "compressed"}, "'compressed' are not served, only those in Model"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type='yarn'"),
        ({"rope_parameters": 5}, "rope_parameters=5"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
    ],
)
def test_a_bad_value_is_refused_by_field_and_value(
    tiny_values: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_dict(tiny_values | change)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_a_bad_value_in_a_file_is_named_with_its_folder(
    tmp_path: Path, tiny_values: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_values | {"rope_parameters": 5}))
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: config\.json: rope_parameters=5"):
        ModelConfig.from_dir(tmp_path)


SIZES = (*_INTEGERS, "num_nextn_predict_layers", "n_group", "topk_group")


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("has_list", [True, False])
def test_an_absurd_size_is_refused_before_anything_is_made_of_it(
    field: str, has_list: bool, tiny_values: dict[str, Any]
) -> None:
    """Such sizes ended in an allocator's traceback, or in a list that had no end."""
    tiny_values |= {field: 10**12, "indexer_types": tiny_values["indexer_types"] * has_list or None}
    if field == "num_attention_heads":
        tiny_values["num_key_value_heads"] = 10**12
    with pytest.raises(ConfigError, match=rf"config\.json: {field}=1000000000000: must"):
        ModelConfig.from_dict(tiny_values)
