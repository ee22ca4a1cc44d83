"""The gated MLP in the forms that its weights come in."""

from collections.abc import Callable

import torch
from torch.nn import functional

from services.worker.model.mlp import GatedMLP, make_mlp
from services.worker.model.spec import ModelSpec


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
