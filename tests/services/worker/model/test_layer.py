"""How a layer threads residual and selection through its blocks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.model.config import ModelConfig
from services.worker.model.experts import MixtureOfExperts
from services.worker.model.experts_parallel import ExpertParallelMixture
from services.worker.model.layer import DecoderLayer, Dense
from services.worker.model.mlp import GatedMLP
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec


@pytest.fixture
def layer(spec: ModelSpec) -> DecoderLayer:
    """A layer whose blocks scale their input, so that the wiring shows."""
    layer: Any = DecoderLayer(spec, 1)
    layer.input_layernorm.weight.fill_(1.0)
    layer.post_attention_layernorm.weight.fill_(1.0)
    layer.self_attn = SimpleNamespace(
        write=lambda x, _step, _cache: (x,),
        attend=lambda queries, _step, _cache, topk: (3 * queries[0], topk + 1),
    )
    layer.mlp = lambda x, _step: 5 * x
    return layer


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("is_first", [True, False])
def test_output_and_residual_add_up_to_the_pre_norm_layer(
    layer: Any, config: ModelConfig, is_first: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, config.hidden_size, generator=generator)
    before = None if is_first else torch.randn(4, config.hidden_size, generator=generator)
    output, residual, topk = layer(x, before, None, None, torch.zeros(4, 1, 2))
    stream = x if before is None else x + before
    attended = stream + 3 * norm(stream)
    torch.testing.assert_close(residual, attended, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output, 5 * norm(attended), atol=1e-5, rtol=1e-5)
    assert (topk == 1).all()


def test_dense_and_sparse_layers_follow_the_config(spec: ModelSpec) -> None:
    layers = [DecoderLayer(spec, at) for at in (0, 1, 4)]
    assert [type(layer.mlp) for layer in layers] == [Dense, MixtureOfExperts, MixtureOfExperts]
    assert isinstance(layers[0].mlp.mlp, GatedMLP)


def test_experts_of_many_ranks_are_exchanged(spec: ModelSpec) -> None:
    layer = DecoderLayer(replace(spec, placement=Placement(ep_size=2)), 1)
    assert isinstance(layer.mlp, ExpertParallelMixture)
