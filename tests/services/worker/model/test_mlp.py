"""The gated MLP in the forms that its weights come in."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from services.worker.model.mlp import DynamicInt8MLP, GatedMLP, make_mlp
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription


def test_the_gated_mlp_equals_its_formula(
    spec: ModelSpec, fill: Callable[..., dict[str, torch.Tensor]]
) -> None:
    mlp = make_mlp(spec, "mlp.", 24)
    assert isinstance(mlp, GatedMLP)
    weights = fill(mlp.slots())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, spec.config.hidden_size, generator=generator)
    gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    expected = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=1e-5)


QUANTIZED = ("gate_proj", "up_proj", "down_proj")


def described(spec: ModelSpec, kind: str) -> ModelSpec:
    types = {f"mlp.{name}.weight": kind for name in QUANTIZED}
    return replace(spec, quantization=QuantDescription(source="d.json", types=types))


def quantized_weights(hidden: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
    shapes["down_proj"] = (hidden, width)
    for name, shape in shapes.items():
        integers = torch.randint(-127, 128, shape, generator=generator)
        tensors[f"mlp.{name}.weight"] = integers.to(torch.int8)
        tensors[f"mlp.{name}.weight_scale"] = torch.rand(shape[0], 1, generator=generator) * 0.002
    return tensors


def row_product(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    scales = x.abs().amax(1, keepdim=True) / 127
    sums = (x / scales).round() @ tensors[f"mlp.{name}.weight"].double().T
    return sums * tensors[f"mlp.{name}.weight_scale"].double().T * scales


def test_an_int8_mlp_keeps_integer_sums_up_to_the_gated_unit(spec: ModelSpec) -> None:
    mlp = make_mlp(described(spec, "W8A8_DYNAMIC"), "mlp.", 24)
    assert isinstance(mlp, DynamicInt8MLP)
    tensors = quantized_weights(spec.config.hidden_size, 24)
    for slot in mlp.slots():
        if slot.is_required:
            slot.store(tensors[slot.name])
    mlp.finish_loading()
    x = torch.randn(7, spec.config.hidden_size, generator=torch.Generator().manual_seed(1))
    gate, up = (row_product(x.double(), tensors, name) for name in QUANTIZED[:2])
    expected = row_product(functional.silu(gate) * up, tensors, "down_proj")
    error = (mlp(x).double() - expected).abs()
    # Hidden values on the edge between two steps may fall to the other side: a step is 1/127.
    assert error.max() < 0.01 * expected.abs().max()
    assert error.median() < 1e-6


def test_an_mlp_of_mixed_kinds_is_computed_by_its_parts(spec: ModelSpec) -> None:
    own = described(spec, "W8A8_DYNAMIC")
    types = dict(own.quantization.types) | {"mlp.down_proj.weight": "FLOAT"}
    own = replace(own, quantization=QuantDescription(source="d.json", types=types))
    assert isinstance(make_mlp(own, "mlp.", 24), GatedMLP)


def test_an_mlp_wider_than_the_devices_gated_unit_is_computed_by_its_parts(spec: ModelSpec) -> None:
    """GLM-5.2's dense layers on one rank; shared by two ranks they fit."""
    own = described(replace(spec, device=torch.device("meta")), "W8A8_DYNAMIC")
    assert isinstance(make_mlp(own, "mlp.", 12288), GatedMLP)
    halved = replace(own, placement=Placement(tp_size=2))
    assert isinstance(make_mlp(halved, "mlp.", 12288), DynamicInt8MLP)
