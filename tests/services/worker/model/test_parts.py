"""Small parts of the decoder that the oracle would not tell apart: seams, tables, refusals."""

from typing import Any

import pytest
import torch

from services.worker.model.attention import SparseLatentAttention
from services.worker.model.backends import BackendKey, attention_backend, backend_for
from services.worker.model.config import ModelConfig
from services.worker.model.mtp import mtp_shapes
from services.worker.model.rope import RotaryTables
from shared.errors import ConfigError


def test_the_sparse_latent_backend_serves_this_family(tiny_values: dict[str, Any]) -> None:
    assert attention_backend(ModelConfig.from_dict(tiny_values)) is SparseLatentAttention


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (BackendKey(True, False, False), "dense latent attention"),
        (BackendKey(False, False, False), "grouped-query attention"),
        (BackendKey(True, False, True), "compressed sparse attention"),
        (BackendKey(False, True, True), "of this kind"),
    ],
)
def test_backends_that_are_not_built_refuse_by_name(key: BackendKey, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        backend_for(key)


def test_rotary_tables_repeat_32_angles_as_halves() -> None:
    tables = RotaryTables(
        dim=64, theta=10000.0, max_positions=100, dtype=torch.float32, device=torch.device("cpu")
    )
    cos, sin = tables.at(torch.tensor([0, 7]))
    assert cos.shape == sin.shape == (2, 1, 1, 64)
    assert torch.equal(cos[..., :32], cos[..., 32:])
    angles = 7 * 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(cos[1, 0, 0, :32].double(), angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[1, 0, 0, :32].double(), angles.sin(), atol=1e-6, rtol=0)


def test_mtp_tensors_are_those_of_the_release(tiny_values: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    shapes = {name: shape for name, shape, is_required in mtp_shapes(config) if is_required}
    assert shapes["model.layers.4.eh_proj.weight"] == (64, 128)
    assert shapes["model.layers.4.shared_head.norm.weight"] == (64,)
    assert shapes["model.layers.4.self_attn.indexer.wk.weight"] == (128, 64)
    assert shapes["model.layers.4.mlp.experts.7.down_proj.weight"] == (64, 32)
    assert "model.layers.4.shared_head.head.weight" not in shapes
    assert not list(mtp_shapes(ModelConfig.from_dict(tiny_values)))
