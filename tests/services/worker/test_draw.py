import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.draw import DrawSettings, draw, draw_by_kernel, draw_by_tensors
from services.worker.ops import native
from services.worker.plan import Ints
from services.worker.uniform import uniform

Draw = Callable[[Tensor, Ints, DrawSettings], Tensor]


@pytest.fixture(params=["tensors", "kernel"])
def way(request: pytest.FixtureRequest) -> Draw:
    """Both ways obey the same law."""
    if request.param == "tensors":
        return draw_by_tensors
    library = native.load()
    if library is None:
        pytest.skip("no compiled kernels here")
    return lambda logits, places, settings: draw_by_kernel(library, logits, places, settings)


def settings(count: int = 1, *, seed: int = 17, **values: float) -> DrawSettings:
    return DrawSettings(
        temperature=np.full(count, values.get("temperature", 1.0), np.float32),
        top_k=np.full(count, values.get("top_k", 0), np.int64),
        top_p=np.full(count, values.get("top_p", 1.0), np.float32),
        min_p=np.full(count, values.get("min_p", 0.0), np.float32),
        seeds=np.full(count, seed),
        positions=np.arange(count),
    )


def draw_often(way: Draw, logits: Tensor, count: int, **values: float) -> Tensor:
    """Tokens of one row at `count` positions."""
    return way(logits[None], np.zeros(count, np.int64), settings(count, **values))


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
def test_exactly_the_tokens_of_the_formula_can_be_drawn(
    way: Draw, filters: dict, spread: float
) -> None:
    # Whole steps between logits: no threshold falls on a tie or into a rounding.
    order = torch.randperm(160, generator=torch.Generator().manual_seed(5))
    logits = -spread * 0.02 * order.float() * (1 + order.float() * 0.001)
    expected = kept_by_formula(logits.tolist(), **filters)
    count = 8_000
    found = set(draw_often(way, logits, count, **filters).tolist())
    assert found <= expected
    probs = torch.softmax(logits, 0)
    # What has 20 expected draws is missed once in 500 million runs.
    assert {i for i in expected if probs[i] > 20 / count} <= found


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_follow_the_renormalised_distribution(way: Draw, filters: dict) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(6)) * 2
    count = 15_000
    tokens = draw_often(way, logits, count, **filters)
    kept = kept_by_formula(logits.tolist(), **filters)
    weights = torch.tensor([math.exp(v) if i in kept else 0 for i, v in enumerate(logits.tolist())])
    expected = (weights / weights.sum() * count)[weights > 0]
    observed = torch.bincount(tokens, minlength=30)
    assert int(observed[weights == 0].sum()) == 0
    chi_square = float(((observed[weights > 0] - expected) ** 2 / expected).sum())
    # Exceeded less than once in 1,000 runs at that many degrees of freedom; the seed is fixed.
    freedom = len(expected) - 1
    assert chi_square <= freedom + 3.1 * math.sqrt(2 * freedom) + 4


def test_the_number_drawn_with_is_the_hash_of_seed_and_position(way: Draw) -> None:
    width, count = 4096, 3000
    seeds = torch.arange(count) * 7_919_000_003 - 2**62
    positions = torch.arange(count) % 77
    chosen = settings(count)
    chosen.seeds[:], chosen.positions[:] = seeds.numpy(), positions.numpy()
    tokens = way(torch.zeros(1, width), np.zeros(count, np.int64), chosen)
    # Every token weighs the same, so the running sums are exact.
    assert torch.equal(tokens, (uniform(seeds, positions) * width).long())


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.9])
def test_logits_are_divided_by_the_temperature(way: Draw, temperature: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    tokens = draw_often(way, logits, 30_000, temperature=temperature)
    observed = torch.bincount(tokens, minlength=12) / 30_000
    torch.testing.assert_close(observed, torch.softmax(logits / temperature, 0), atol=0.012, rtol=0)


def test_equal_tokens_are_kept_together(way: Draw) -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 2.0, -1.0, 0.5, 0.1, 0.2, 0.3, 0.4])
    assert set(draw_often(way, logits, 1000, top_k=2).tolist()) == {1, 2, 3}
    assert set(draw_often(way, logits, 1000, top_p=0.2).tolist()) == {1, 2, 3}
    assert len(set(draw_often(way, torch.zeros(300), 9000, top_k=3).tolist())) == 300


def test_the_ends_of_the_unit_interval_give_kept_tokens(way: Draw) -> None:
    positions = torch.arange(1 << 20)
    u = uniform(torch.full_like(positions, 17), positions)
    logits = torch.tensor([[-50.0, 1.0, 2.0, -60.0]])
    for filters in ({}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.2}):
        for at, token in ((int(u.argmin()), 1), (int(u.argmax()), 2)):
            chosen = settings(**filters)
            chosen.positions[0] = at
            assert way(logits, np.array([0]), chosen).tolist() == [token]


def test_a_masked_token_is_never_drawn(way: Draw) -> None:
    logits = torch.full((50,), -math.inf)
    logits[[7, 31]] = torch.tensor([0.0, 1.0])
    for filters in FILTERS:
        assert set(draw_often(way, logits, 300, **filters).tolist()) <= {7, 31}


def test_a_row_is_drawn_alike_in_any_batch(way: Draw) -> None:
    count = len(FILTERS)
    logits = torch.randn(count, 700, generator=torch.Generator().manual_seed(8)) * 3
    rows = [settings(seed=i, **filters) for i, filters in enumerate(FILTERS)]
    names = DrawSettings.__dataclass_fields__
    together = DrawSettings(
        **{name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
    )
    batch = way(logits, np.arange(count), together)
    for index, row in enumerate(rows):
        assert way(logits[index : index + 1], np.array([0]), row) == batch[index]
        assert way(logits, np.array([index]), row) == batch[index]


def test_logits_may_be_a_slice_of_wider_rows(way: Draw) -> None:
    wide = torch.randn(5, 60, generator=torch.Generator().manual_seed(9))
    places = np.array([4, 1])
    found = way(wide[:, :40], places, settings(2, top_p=0.9))
    assert torch.equal(found, way(wide[:, :40].contiguous(), places, settings(2, top_p=0.9)))


def test_rows_of_nan_end_inside_the_vocabulary(way: Draw) -> None:
    for value in (math.nan, math.inf, -math.inf):
        for filters in FILTERS:
            logits = torch.full((1, 40), value)
            assert 0 <= way(logits, np.array([0]), settings(**filters)).item() < 40


def test_both_ways_agree_but_for_rounding() -> None:
    library = native.load()
    if library is None:
        pytest.skip("no compiled kernels here")
    logits = torch.randn(2000, 2048, generator=torch.Generator().manual_seed(10)) * 4
    chosen, places = settings(2000), np.arange(2000)
    cases = [np.resize(np.array([f.get(n, d) for f in FILTERS]), 2000)
             for n, d in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]  # fmt: skip
    for column, values in zip((chosen.top_k, chosen.top_p, chosen.min_p), cases, strict=True):
        column[:] = values
    by_kernel = draw_by_kernel(library, logits, places, chosen)
    assert torch.equal(draw(logits, places, chosen), by_kernel)
    # A token changes where u falls within rounding of a border: a handful in 2,000.
    assert int((draw_by_tensors(logits, places, chosen) != by_kernel).sum()) <= 4
