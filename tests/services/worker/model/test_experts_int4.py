"""What is particular to weights two to a byte; the products are in `test_experts_int8.py`."""

from dataclasses import replace

import pytest
import torch

from services.worker.model.experts import MixtureOfExperts, make_experts
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription, Scheme
from shared.errors import CheckpointError
from tests.services.worker.model.quantized_experts import (
    NAMES,
    described,
    load,
    routing,
    tensors_of,
)


def test_the_sums_of_the_file_decide_about_the_zero_point(spec: ModelSpec) -> None:
    """`scale_bias` is taken from the file: another one moves the result."""
    _, tensors = tensors_of(spec, Scheme.W4A8_DYNAMIC, 7)
    changed = {
        name: tensor + 1 if name.endswith("scale_bias") else tensor
        for name, tensor in tensors.items()
    }
    x = torch.randn(3, spec.config.hidden_size, generator=torch.Generator().manual_seed(5))
    results = []
    for each in (tensors, changed):
        block = make_experts(described(spec, Scheme.W4A8_DYNAMIC), "experts.")
        load(block, each)
        results.append(block(x, *routing(3)))
    assert not torch.allclose(*results, atol=1e-3)


def test_int4_is_for_routed_experts_only(spec: ModelSpec) -> None:
    own = described(spec, Scheme.W8A8_DYNAMIC)
    types = dict(own.quantization.types)
    types |= {f"shared_experts.{name}.weight": "W4A8_DYNAMIC" for name in NAMES}
    own = replace(own, quantization=QuantDescription(source="d.json", types=types))
    with pytest.raises(CheckpointError, match="W4A8_DYNAMIC is served for routed experts only"):
        MixtureOfExperts(own, "")


def test_outputs_that_share_a_byte_stay_together(spec: ModelSpec) -> None:
    config = replace(spec.config, moe_intermediate_size=36, n_shared_experts=4)
    placement = Placement(tp_size=4)
    own = described(replace(spec, config=config, placement=placement), Scheme.W4A8_DYNAMIC)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight: outputs that share"):
        list(make_experts(own, "experts.").slots())
