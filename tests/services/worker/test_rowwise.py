import math

import pytest
import torch

from services.worker import rowwise
from services.worker.rowwise import argmax_rows, largest


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(rowwise.native, "load", lambda: None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("width", [1, 63, 64, 65, 300])
def test_rows_of_any_width_and_of_nothing_else_than_infinities(width: int) -> None:
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    logits[1] = -math.inf
    logits[2, width // 2] = math.inf
    values, ids = argmax_rows(logits)
    assert torch.equal(ids, torch.argmax(logits, dim=1))
    assert torch.equal(values, logits.amax(dim=1))


@pytest.mark.usefixtures("way")
def test_the_lowest_id_wins_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, 0.5]])
    values, ids = argmax_rows(logits)
    assert ids.tolist() == [1, 0, 2]
    assert values.tolist() == [3.0, 2.0, 0.5]


@pytest.mark.usefixtures("way")
def test_argmax_equals_torch_on_random_rows_and_on_a_slice() -> None:
    wide = torch.randn(50, 333, generator=torch.Generator().manual_seed(0))
    for logits in (wide, wide[:, :300]):
        assert torch.equal(argmax_rows(logits)[1], torch.argmax(logits, dim=1))


@pytest.mark.usefixtures("way")
def test_a_nan_is_found_wherever_it_is() -> None:
    logits = torch.zeros(3, 40)
    logits[1, 17] = logits[1, 20] = math.nan
    values, ids = argmax_rows(logits)
    assert torch.isnan(values).tolist() == [False, True, False]
    assert ids[1] == 17


@pytest.mark.parametrize("width", [100, 8192, 8200, 20_000])
@pytest.mark.parametrize("count", [1, 8, 100])
def test_the_largest_are_found_in_order_with_their_ids(width: int, count: int) -> None:
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(width))
    values, ids = largest(logits, count)
    assert torch.equal(values, torch.topk(logits, count).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist())


def test_equal_values_across_groups_are_all_found() -> None:
    logits = torch.zeros(1, 16_003)
    logits[0, ::1000] = 1.0
    logits[0, -1] = 2.0
    values, ids = largest(logits, 18)
    assert values[0].tolist() == [2.0] + [1.0] * 17
    assert ids[0, 0] == 16_002 or values[0, 0] == 2.0
