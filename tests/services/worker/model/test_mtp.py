"""Names and shapes of the MTP layer that the loader leaves in the file."""

from typing import Any

import torch

from services.worker.model.config import ModelConfig
from services.worker.model.mtp import MTPLayer
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec


def slots(values: dict[str, Any]) -> list[WeightSlot]:
    config = ModelConfig.from_dict(values | {"num_nextn_predict_layers": 1})
    spec = ModelSpec(config=config, dtype=torch.bfloat16, device=torch.device("meta"))
    return list(MTPLayer(spec).slots())


def test_mtp_tensors_are_those_of_the_release(tiny_values: dict[str, Any]) -> None:
    shapes = {slot.name: slot.shape for slot in slots(tiny_values) if slot.is_required}
    assert shapes["model.layers.4.eh_proj.weight"] == (64, 128)
    assert shapes["model.layers.4.shared_head.norm.weight"] == (64,)
    assert shapes["model.layers.4.self_attn.indexer.wk.weight"] == (128, 64)
    assert shapes["model.layers.4.mlp.experts.7.down_proj.weight"] == (64, 32)


def test_copies_of_embeddings_and_head_are_optional_and_not_read(
    tiny_values: dict[str, Any],
) -> None:
    optional = {slot.name: slot for slot in slots(tiny_values) if not slot.is_required}
    assert optional.keys() == {
        "model.layers.4.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight",
    }
    assert all(slot.kept_shape == (0, 0) for slot in optional.values())
