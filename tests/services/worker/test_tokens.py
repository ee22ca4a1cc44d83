import numpy as np
import pytest
import torch

from services.worker.sampling_rows import SamplingRows
from services.worker.tokens import OwnTokens
from tests.services.worker.plans import make_sequence


def test_a_rank_alone_samples_measures_and_drafts_for_itself() -> None:
    settings = SamplingRows(1, 4)
    settings.admit(make_sequence(0, [1], temperature=0.0))
    tokens, row = OwnTokens(), np.array([0])
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    sampled = tokens.sample(logits, settings, row, row, np.array([-1]))
    assert sampled.tokens.tolist() == [1]
    drafts = np.array([4, 2])
    assert tokens.share(drafts) is drafts
    marker = object()
    assert tokens.measure(lambda: marker) is marker  # type: ignore[arg-type,return-value]  # a marker


def test_a_rank_alone_has_the_head() -> None:
    row = np.array([0])
    with pytest.raises(AssertionError):
        OwnTokens().sample(None, SamplingRows(1, 4), row, row, np.array([-1]))
