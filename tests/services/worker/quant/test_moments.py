"""Mean squares of each expert's inputs."""

import torch

from services.worker.quant import moments as module
from services.worker.quant.moments import Moments


def test_an_expert_is_judged_by_its_own_rows_and_a_little_by_all() -> None:
    moments = Moments(2, 3)
    first, second = torch.full((600, 3), 2.0), torch.full((200, 3), 4.0)
    rows = torch.cat((first, second, torch.full((5, 3), torch.nan)))  # rows of no expert
    moments.add(rows, torch.tensor([600, 200]))
    common = (600 * 4 + 200 * 16) / 800
    shared = module._SHARED_ROWS
    expected = (200 * 16 + shared * common) / (200 + shared)
    found = moments.of(1)
    assert found is not None
    torch.testing.assert_close(found, torch.full((3,), expected))


def test_steps_add_up() -> None:
    once, twice = Moments(2, 4), Moments(2, 4)
    rows = torch.randn(6, 4)
    once.add(rows[[0, 1, 3, 2, 4, 5]], torch.tensor([3, 3]))
    twice.add(rows[:3], torch.tensor([2, 1]))
    twice.add(rows[3:], torch.tensor([1, 2]))
    for expert in (0, 1):
        torch.testing.assert_close(once.of(expert), twice.of(expert))


def test_an_expert_that_nobody_chose_is_judged_by_what_the_others_saw() -> None:
    moments = Moments(2, 2)
    moments.add(torch.full((10, 2), 3.0), torch.tensor([10, 0]))
    found = moments.of(1)
    assert found is not None
    torch.testing.assert_close(found, torch.full((2,), 9.0))


def test_without_any_row_nothing_is_known() -> None:
    moments = Moments(2, 2)
    moments.add(torch.empty(0, 2), torch.tensor([0, 0]))
    assert moments.of(0) is None
