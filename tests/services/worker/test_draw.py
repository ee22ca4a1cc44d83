import math

import numpy as np
import pytest
import torch

from services.worker.draw import DrawSettings, draw


def settings(count: int = 1, **values: float) -> DrawSettings:
    return DrawSettings(
        top_k=np.full(count, values.get("top_k", 0), np.int64),
        top_p=np.full(count, values.get("top_p", 1.0), np.float32),
        min_p=np.full(count, values.get("min_p", 0.0), np.float32),
    )


def kept_by_formula(logits: list[float], **values: float) -> set[int]:
    """min-p, top-k, then top-p on the rest, one token at a time; ties are the tests' to avoid."""
    top_k, top_p = int(values.get("top_k", 0)), values.get("top_p", 1.0)
    weights = {i: math.exp(v - max(logits)) for i, v in enumerate(logits)}
    total = sum(weights.values())
    probs = {i: w / total for i, w in weights.items()}
    order = sorted(probs, key=lambda i: -probs[i])
    order = [i for i in order if probs[i] >= values.get("min_p", 0.0) * probs[order[0]]]
    if top_k:
        order = order[:top_k]
    left = sum(probs[i] for i in order)
    kept, mass = set(), 0.0
    for token in order:
        if mass >= top_p * left:
            break
        kept.add(token)
        mass += probs[token]
    return kept


def reachable(logits: torch.Tensor, chosen: DrawSettings, *, grid: int = 4000) -> set[int]:
    u = (torch.arange(grid) + 0.5) / grid
    repeated = DrawSettings(
        top_k=np.repeat(chosen.top_k, grid),
        top_p=np.repeat(chosen.top_p, grid),
        min_p=np.repeat(chosen.min_p, grid),
    )
    return set(draw(logits.expand(grid, -1), repeated, u).tolist())


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 8},
    {"top_k": 9},
    {"top_k": 40},
    {"top_k": 500},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "min_p": 0.2},
    {"top_p": 0.8, "min_p": 0.05},
    {"top_k": 12, "top_p": 0.6, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("spread", [0.3, 1.5, 5.0])
def test_exactly_the_tokens_of_the_formula_can_be_drawn(filters: dict, spread: float) -> None:
    # Whole steps between logits: no threshold falls on a tie or into a rounding.
    order = torch.randperm(160, generator=torch.Generator().manual_seed(5))
    logits = -spread * 0.02 * order.float() * (1 + order.float() * 0.001)
    expected = kept_by_formula(logits.tolist(), **filters)
    found = reachable(logits[None], settings(**filters), grid=20_000)
    assert found <= expected
    probs = torch.softmax(logits, 0)
    visible = {i for i in expected if probs[i] > 2e-4}
    assert visible <= found


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_follow_the_renormalised_distribution(filters: dict) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(6)) * 2
    count = 40_000
    u = (torch.arange(count) + 0.5) / count
    tokens = draw(logits.expand(count, -1), settings(count, **filters), u)
    kept = kept_by_formula(logits.tolist(), **filters)
    weights = torch.tensor([math.exp(v) if i in kept else 0 for i, v in enumerate(logits.tolist())])
    expected = weights / weights.sum()
    # u on an even grid: each share is exact up to the two ends of its interval.
    observed = torch.bincount(tokens, minlength=30) / count
    torch.testing.assert_close(observed, expected, atol=3 / count + 2e-6, rtol=0)


def test_random_draws_pass_a_chi_square_test() -> None:
    from services.worker.uniform import uniform

    logits = torch.randn(20, generator=torch.Generator().manual_seed(7))
    count = 50_000
    u = uniform(torch.full((count,), 11), torch.arange(count))
    tokens = draw(logits.expand(count, -1), settings(count, top_p=0.95), u)
    kept = kept_by_formula(logits.tolist(), top_p=0.95)
    probs = torch.tensor([math.exp(v) if i in kept else 0 for i, v in enumerate(logits.tolist())])
    expected = (probs / probs.sum() * count)[probs > 0]
    observed = torch.bincount(tokens, minlength=20)[probs > 0]
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 45  # at most 19 degrees of freedom: exceeded less than once in 1,000 runs


def test_equal_tokens_are_kept_together() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, -1.0, 0.5, 0.1, 0.2, 0.3, 0.4]])
    assert reachable(logits, settings(top_k=2)) == {1, 2, 3}
    assert reachable(logits, settings(top_p=0.2)) == {1, 2, 3}
    flat = torch.zeros(1, 300)
    assert len(reachable(flat, settings(top_k=3))) == 300


def test_the_ends_of_the_unit_interval_give_kept_tokens() -> None:
    logits = torch.tensor([[-50.0, 1.0, 2.0, -60.0]])
    almost_one = 1 - 2.0**-24
    for filters in ({}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.2}):
        low = draw(logits, settings(**filters), torch.tensor([0.0]))
        high = draw(logits, settings(**filters), torch.tensor([almost_one]))
        assert low.item() in ({0, 1} if not filters else {1})
        assert high.item() == 2


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, [7, 31]] = torch.tensor([0.0, 1.0])
    for filters in FILTERS:
        assert reachable(logits, settings(**filters), grid=200) <= {7, 31}


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(len(FILTERS), 700, generator=generator) * 3
    u = torch.rand(len(FILTERS), generator=generator)
    rows = [settings(**filters) for filters in FILTERS]
    together = DrawSettings(
        top_k=np.concatenate([row.top_k for row in rows]),
        top_p=np.concatenate([row.top_p for row in rows]),
        min_p=np.concatenate([row.min_p for row in rows]),
    )
    batch = draw(logits, together, u)
    for index, row in enumerate(rows):
        assert draw(logits[index : index + 1], row, u[index : index + 1]) == batch[index]


def test_rows_of_nan_end_inside_the_vocabulary() -> None:
    logits = torch.full((1, 40), math.nan)
    for filters in FILTERS:
        assert 0 <= draw(logits, settings(**filters), torch.tensor([0.3])).item() < 40
