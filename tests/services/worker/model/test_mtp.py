"""Names and shapes of the MTP layer that the loader leaves in the file."""

from typing import Any

from services.worker.model.config import ModelConfig
from services.worker.model.mtp import mtp_shapes


def test_mtp_tensors_are_those_of_the_release(tiny_values: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    shapes = {name: shape for name, shape, is_required in mtp_shapes(config) if is_required}
    assert shapes["model.layers.4.eh_proj.weight"] == (64, 128)
    assert shapes["model.layers.4.shared_head.norm.weight"] == (64,)
    assert shapes["model.layers.4.self_attn.indexer.wk.weight"] == (128, 64)
    assert shapes["model.layers.4.mlp.experts.7.down_proj.weight"] == (64, 32)


def test_copies_of_embeddings_and_head_are_optional(tiny_values: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    optional = {name for name, _, is_required in mtp_shapes(config) if not is_required}
    assert optional == {
        "model.layers.4.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight",
    }


def test_a_model_without_mtp_has_no_such_tensor(tiny_values: dict[str, Any]) -> None:
    assert not list(mtp_shapes(ModelConfig.from_dict(tiny_values)))
