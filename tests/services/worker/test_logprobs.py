import math

import numpy as np
import pytest
import torch

from services.worker.logprobs import measure


def test_columns_equal_the_formula() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0], [2.0, 1.0, 0.0, 3.0]])
    columns = measure(logits, torch.tensor([2, 2, 1]), np.array([2, 0, 1]))
    expected = torch.log_softmax(logits, dim=1)
    assert columns.sampled_logprobs == pytest.approx(expected[[0, 1, 2], [2, 2, 1]].numpy())
    assert columns.sampled_ranks.tolist() == [2, 1, 3]
    assert columns.num_top_logprobs.tolist() == [2, 0, 1]
    assert columns.top_token_ids.tolist() == [1, 2, 3]
    best = [expected[0, 1], expected[0, 2], expected[2, 3]]
    assert columns.top_logprobs == pytest.approx([float(value) for value in best])


def test_equal_logits_share_the_better_rank() -> None:
    columns = measure(torch.zeros(1, 5), torch.tensor([4]), np.array([0]))
    assert columns.sampled_ranks.tolist() == [1]
    assert columns.sampled_logprobs == pytest.approx([-math.log(5)])
    assert columns.top_token_ids.tolist() == []


def test_all_alternatives_can_be_asked_for() -> None:
    columns = measure(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), np.array([3]))
    assert columns.top_token_ids.tolist() == [1, 2, 0]
    assert np.exp(columns.top_logprobs).sum() == pytest.approx(1.0)
