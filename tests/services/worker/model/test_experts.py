"""The mixture of experts against one expert at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from services.worker.model.experts import FloatExperts, MixtureOfExperts
from services.worker.model.spec import ModelSpec


def mlp(x: torch.Tensor, weights: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("tokens", [1, 33])
def test_the_block_equals_a_sum_over_chosen_experts(
    spec: ModelSpec,
    fill: Callable[..., dict[str, torch.Tensor]],
    first_step: Callable[..., Any],
    num_shared: int,
    tokens: int,
) -> None:
    config = replace(spec.config, n_shared_experts=num_shared)
    block = MixtureOfExperts(replace(spec, config=config), "")
    weights = fill(block.slots())
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(4))
    scores = (x @ weights["gate.weight"].T).sigmoid()
    chosen = (scores + weights["gate.e_score_correction_bias"]).topk(2).indices
    expected = mlp(x, weights, "shared_experts.")
    for token in range(tokens):
        share = scores[token, chosen[token]]
        share = share / share.sum() * config.routed_scaling_factor
        for weight, expert in zip(share, chosen[token].tolist(), strict=True):
            part = mlp(x[token : token + 1], weights, f"experts.{expert}.")
            expected[token] += weight * part[0]
    # float32, two ways to order sums of 64 products of size 1.
    result = block(x, first_step(tokens)[0])
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_the_router_is_float32_in_a_bfloat16_block(spec: ModelSpec) -> None:
    block = MixtureOfExperts(replace(spec, dtype=torch.bfloat16), "")
    assert block.gate.weight.dtype == torch.float32
    assert block.gate.e_score_correction_bias.dtype == torch.float32
    assert isinstance(block.experts, FloatExperts)
    assert block.experts.w13.dtype == torch.bfloat16
