"""Projections and the gated MLP."""

from collections.abc import Callable

import torch
from torch.nn import functional

from services.worker.model.linear import GatedMLP, Linear

CPU = torch.device("cpu")


def test_a_projection_multiplies_by_the_transpose_of_the_checkpoint_matrix() -> None:
    linear = Linear(8, 3, torch.float32, CPU)
    matrix = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    linear.weight.copy_(matrix.T)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(linear(x), functional.linear(x, matrix), atol=1e-5, rtol=1e-5)


def test_the_gated_mlp_equals_its_formula(
    fill: Callable[..., dict[str, torch.Tensor]],
) -> None:
    mlp = GatedMLP(16, 24, torch.float32, CPU)
    weights = fill(mlp.slots("mlp."))
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    expected = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=1e-5)
