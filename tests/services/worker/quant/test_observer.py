"""Watching a layer's products without the model knowing of it."""

import pytest
import torch
from torch import Tensor

from services.worker.model.layer import DecoderLayer
from services.worker.model.spec import ModelSpec
from services.worker.quant.input_range import Histogram
from services.worker.quant.moments import Moments
from services.worker.quant.observer import InputObserver, LayerInputs
from services.worker.quant.recipe import RECIPES

ATTENTION = "model.layers.0.self_attn."


def test_only_watched_weights_are_looked_at() -> None:
    watched, other = torch.randn(8, 8), torch.randn(8, 8)
    histogram = Histogram()
    rows = torch.full((3, 8), 4.0)
    with InputObserver({watched.data_ptr(): histogram}, {}):
        torch.ops.glm.linear(rows, other)
        assert histogram.best_range() == Histogram().best_range()
        product = torch.ops.glm.linear(rows, watched)
    torch.testing.assert_close(product, rows @ watched)
    # All 256 levels for 0 to 4.
    assert histogram.best_range().scale == pytest.approx(4 / 255, rel=2**-7)


def test_grouped_products_are_told_apart_by_expert() -> None:
    weight = torch.randn(2, 8, 8)
    moments = Moments(2, 8)
    rows = torch.cat((torch.full((200, 8), 1.0), torch.full((300, 8), 3.0)))
    with InputObserver({}, {weight.data_ptr(): moments}):
        torch.ops.npu.npu_grouped_matmul(
            [rows],
            [weight],
            group_list=torch.tensor([200, 300]),
            split_item=2,
            group_type=0,
            group_list_type=1,
        )
    means = [moments.of(expert) for expert in (0, 1)]
    assert all(isinstance(mean, Tensor) for mean in means)
    assert float(means[0][0]) < 4 < float(means[1][0])


def inputs_of(spec: ModelSpec, layer: int, scheme: str) -> LayerInputs:
    return LayerInputs(DecoderLayer(spec, layer), RECIPES[scheme])


def test_matrices_of_one_product_have_one_range(spec: ModelSpec) -> None:
    inputs = inputs_of(spec, 0, "w8a8")
    inputs.finish()
    names = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "indexer.wq_b")
    first, second, *_ = [inputs.range_of(f"{ATTENTION}{name}") for name in names]
    assert first is second


def test_a_layer_without_an_indexer_has_no_range_for_it(spec: ModelSpec) -> None:
    inputs = inputs_of(spec, 1, "w8a8")
    inputs.finish()
    with pytest.raises(KeyError):
        inputs.range_of("model.layers.1.self_attn.indexer.wq_b")


def test_gate_and_up_of_an_expert_see_the_same(spec: ModelSpec) -> None:
    layer = DecoderLayer(spec, 1)
    inputs = LayerInputs(layer, RECIPES["w4a8c8"])
    experts = layer.mlp.experts
    with inputs.observer():
        torch.ops.npu.npu_grouped_matmul(
            [torch.full((8, 64), 2.0)],
            [experts.w13],
            group_list=torch.tensor([0, 0, 8, 0, 0, 0, 0, 0]),
            split_item=2,
            group_type=0,
            group_list_type=1,
        )
    inputs.finish()
    name = "model.layers.1.mlp.experts.2."
    gate, up = (inputs.moments_of(f"{name}{kind}_proj") for kind in ("gate", "up"))
    assert gate is not None
    assert torch.equal(gate, torch.full((64,), 4.0))
    assert up is not None
    assert torch.equal(gate, up)
    assert inputs.moments_of(f"{name}down_proj") is None
