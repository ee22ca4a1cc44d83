"""Which form each product gets."""

from dataclasses import replace

import pytest
import torch

from services.worker.model.linear import Linear
from services.worker.model.linear_int8 import DynamicInt8Linear, StaticInt8Linear
from services.worker.model.placement import Placement
from services.worker.model.projections import (
    check_is_float,
    make_float_projection,
    make_projection,
)
from services.worker.model.shards import Cut
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription
from shared.errors import CheckpointError


def described(spec: ModelSpec, **types: str) -> ModelSpec:
    values = {f"p.{name}.weight": kind for name, kind in types.items()}
    return replace(spec, quantization=QuantDescription(source="d.json", types=values))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("FLOAT", Linear), ("W8A8_DYNAMIC", DynamicInt8Linear), ("W8A8", StaticInt8Linear)],
)
def test_the_scheme_chooses_the_form(spec: ModelSpec, kind: str, expected: type) -> None:
    assert isinstance(make_projection(described(spec, w=kind), "p.", {"w": 8}, 16), expected)


def test_a_description_that_says_nothing_leaves_floats(spec: ModelSpec) -> None:
    projection = make_projection(spec, "p.", {"w": 8}, 16)
    assert isinstance(projection, Linear)
    assert projection.weight.shape == (16, 8)


def test_the_rank_gets_its_part(spec: ModelSpec) -> None:
    cut = replace(spec, placement=Placement(tp_size=4, tp_rank=1))
    projection = make_projection(cut, "p.", {"w": 8}, 16, Cut.OUTPUTS)
    assert isinstance(projection, Linear)
    assert projection.weight.shape == (16, 2)


def test_what_must_be_float_is_whole_and_refused_otherwise(spec: ModelSpec) -> None:
    cut = replace(described(spec, w="FLOAT"), placement=Placement(tp_size=4, tp_rank=1))
    assert make_float_projection(cut, "p.", {"w": 8}, 16).weight.shape == (16, 8)
    quantized = described(spec, w="W8A8")
    with pytest.raises(CheckpointError, match=r"d\.json: p\.w\.weight: is W8A8, must be FLOAT"):
        make_float_projection(quantized, "p.", {"w": 8}, 16)
    with pytest.raises(CheckpointError, match=r"p\.w\.weight: is W8A8"):
        check_is_float(quantized, "p.", "w")


def test_weights_are_held_in_the_models_type(spec: ModelSpec) -> None:
    half = replace(described(spec, w="FLOAT"), dtype=torch.bfloat16)
    assert make_float_projection(half, "p.", {"w": 8}, 16).weight.dtype == torch.bfloat16
