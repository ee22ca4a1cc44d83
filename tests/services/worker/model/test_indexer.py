"""The indexer: what it caches and what it selects."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from services.worker.model.indexer import Indexer
from services.worker.model.spec import ModelSpec


def rotate_first_half(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, 128] with the pairs of the first 64 lanes rotated, even lanes first."""
    frequencies = 1e4 ** (-torch.arange(32, dtype=torch.float32) / 32)
    angles = torch.arange(x.shape[0])[:, None, None] * frequencies
    even, odd = x[..., 0:64:2], x[..., 1:64:2]
    rotated = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
    return torch.cat((*rotated, x[..., 64:]), -1)


def test_keys_are_normed_rotated_and_cached_and_the_best_are_selected(
    spec: ModelSpec,
    fill: Callable[..., dict[str, torch.Tensor]],
    first_step: Callable[[int], Any],
) -> None:
    config, indexer = spec.config, Indexer(spec, 0, "")
    weights = fill(indexer.slots())
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, config.hidden_size, generator=generator)
    q_latent = torch.randn(60, config.q_lora_rank, generator=generator)
    step, cache = first_step(60)
    own_keys, head_weights = indexer.project(x, step)
    indexer.key_cache.write(own_keys, step, cache)
    selected = indexer.select(q_latent, head_weights, step, cache)

    keys = functional.layer_norm(
        x @ weights["wk.weight"].T, (128,), weights["k_norm.weight"], weights["k_norm.bias"], 1e-6
    )
    keys = rotate_first_half(keys[:, None])[:, 0]
    torch.testing.assert_close(cache.indexer[2, :60, 0], keys, atol=1e-4, rtol=1e-4)
    assert cache.indexer[:2].count_nonzero() == 0

    queries = (q_latent @ weights["wq_b.weight"].T).view(60, config.index_n_heads, 128)
    products = torch.einsum("thd,sd->ths", rotate_first_half(queries), keys).relu()
    scores = torch.einsum("th,ths->ts", x @ weights["weights_proj.weight"].T, products)
    for token in range(60):
        count = min(token + 1, config.index_topk)
        chosen = selected[token, 0, :count].long()
        assert len(set(chosen.tolist())) == count
        best = scores[token, : token + 1].sort(descending=True).values[count - 1]
        assert scores[token, chosen].min() >= best - 1e-3  # scores near 10 in float32
        assert (selected[token, 0, count:] == -1).all()
