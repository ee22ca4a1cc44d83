"""Masks over logits, compiled and with torch."""

import math

import numpy as np
import pytest
import torch

from services.worker.grammar import masking
from services.worker.grammar.masking import allow_only


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(masking.native, "load", lambda: None)


def packed(allowed: np.ndarray) -> torch.Tensor:
    bits = np.packbits(allowed, axis=1, bitorder="little")
    bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
    return torch.from_numpy(bits.view(np.int32))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("width", [1, 31, 32, 33, 200])
def test_only_allowed_ids_of_the_masked_rows_stay_possible(width: int) -> None:
    numbers = np.random.default_rng(width)
    logits = torch.from_numpy(numbers.normal(size=(5, width)).astype(np.float32))
    before = logits.clone()
    allowed = numbers.random((2, width)) < 0.5
    allowed[1] = True
    allow_only(logits, np.array([3, 1]), packed(allowed))
    assert torch.equal(logits[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert torch.equal(logits[3] == -math.inf, torch.from_numpy(~allowed[0]))
    assert torch.equal(logits[3][allowed[0]], before[3][allowed[0]])


@pytest.mark.usefixtures("way")
def test_ids_behind_the_mask_are_impossible() -> None:
    logits = torch.zeros(1, 70)
    allow_only(logits, np.array([0]), packed(np.ones((1, 32), np.bool_)))
    assert (logits[0] == 0).sum() == 32
    assert bool((logits[0, 32:] == -math.inf).all())


@pytest.mark.usefixtures("way")
def test_rows_of_a_wider_table_are_masked_where_they_lie() -> None:
    wide = torch.zeros(3, 50)
    allow_only(wide[:, :40], np.array([1]), packed(np.zeros((1, 40), np.bool_)))
    assert bool((wide[1, :40] == -math.inf).all())
    assert bool((wide[1, 40:] == 0).all())
    assert bool((wide[[0, 2]] == 0).all())


@pytest.mark.usefixtures("way")
def test_a_mask_keeps_what_is_not_a_number_where_it_allows_it() -> None:
    logits = torch.tensor([[math.nan, 1.0, math.nan]])
    allow_only(logits, np.array([0]), packed(np.array([[True, True, False]])))
    assert math.isnan(logits[0, 0])
    assert logits[0, 2] == -math.inf
