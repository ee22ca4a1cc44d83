"""Absorbed attention against the expanded form: keys and values per head, no latent space."""

from collections.abc import Callable
from typing import Any

import torch

from services.worker.model.attention import SparseLatentAttention
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of [T, heads, 64] by position, as complex numbers."""
    frequencies = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequencies
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], 32, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])


def expanded(
    x: torch.Tensor, weights: dict[str, torch.Tensor], config: ModelConfig
) -> torch.Tensor:
    """Multi-head attention with explicit keys and values, float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x, heads, tokens = x.double(), config.num_attention_heads, x.shape[0]
    eps = config.latent_norm_eps
    q_latent = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], eps)
    query = (q_latent @ w["q_b_proj.weight"].T).view(tokens, heads, -1)
    kv = x @ w["kv_a_proj_with_mqa.weight"].T
    latent = norm(kv[:, :512], w["kv_a_layernorm.weight"], eps)
    keys_values = (latent @ w["kv_b_proj.weight"].T).view(tokens, heads, -1)
    keys, values = keys_values.split([config.qk_nope_head_dim, config.v_head_dim], -1)
    logits = torch.einsum("thp,shp->hts", query[..., : config.qk_nope_head_dim], keys)
    q_rope = rotate(query[..., config.qk_nope_head_dim :]).flatten(2)
    k_rope = rotate(kv[:, None, 512:]).flatten(2)[:, 0]
    logits += torch.einsum("thr,sr->hts", q_rope, k_rope)
    hidden_future = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), 1)
    logits = (logits / config.qk_head_dim**0.5).masked_fill(hidden_future, float("-inf"))
    attended = torch.einsum("hts,shd->thd", logits.softmax(-1), values)
    return attended.flatten(1) @ w["o_proj.weight"].T


def test_absorbed_attention_equals_the_expanded_form(
    spec: ModelSpec,
    fill: Callable[..., dict[str, torch.Tensor]],
    first_step: Callable[[int], Any],
) -> None:
    attention = SparseLatentAttention(spec, 0, "")
    config, weights = spec.config, fill(attention.slots())
    x = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(2))
    step, cache = first_step(12)
    output, _ = attention(x, step, cache, torch.empty(0))
    # float32 sums of up to 576 products against float64.
    torch.testing.assert_close(output.double(), expanded(x, weights, config), atol=1e-4, rtol=1e-4)


def test_a_layer_without_indexer_uses_the_positions_it_is_given(
    spec: ModelSpec,
    fill: Callable[..., dict[str, torch.Tensor]],
    first_step: Callable[[int], Any],
) -> None:
    attention = SparseLatentAttention(spec, 1, "")
    config = spec.config
    assert attention.indexer is None
    weights = fill(attention.slots())
    assert not any("indexer" in name for name in weights)
    x = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(2))
    step, cache = first_step(12)
    only_self = torch.full((12, 1, 16), -1, dtype=torch.int32)
    only_self[:, 0, 0] = torch.arange(12, dtype=torch.int32)
    output, returned = attention(x, step, cache, only_self)
    assert returned is only_self
    # Attending to itself alone, a token gets its own value.
    latent = norm(
        x @ weights["kv_a_proj_with_mqa.weight"].T[:, :512],
        weights["kv_a_layernorm.weight"],
        config.latent_norm_eps,
    )
    values = (latent @ weights["kv_b_proj.weight"].T).view(12, config.num_attention_heads, -1)
    expected = values[..., config.qk_nope_head_dim :].flatten(1) @ weights["o_proj.weight"].T
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
