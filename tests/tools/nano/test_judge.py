"""Judging without generating: one wrong token makes an answer wrong."""

from pathlib import Path

import pytest
import torch

from tools.nano import judge
from tools.nano.config import model_config
from tools.nano.data import Encoder
from tools.nano.model import Nano
from tools.nano.start import initialise

FOLDER = Path(__file__).parents[3] / "models" / "glm-nano"


def _oracle(_: Nano, rows: torch.Tensor, __: str) -> tuple[torch.Tensor, torch.Tensor]:
    best = torch.cat((rows[0, 1:], rows[0, :1]))
    return best, best[1:]


def test_model_that_says_every_right_token_scores_one(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(FOLDER)
    monkeypatch.setattr(judge, "_predictions", _oracle)
    model = Nano(model_config(encoder.tokenizer))
    found = judge.score(model, encoder, "tool_call", count=5, seed=1)
    assert found == {"right": 1.0, "tokens": 1.0, "drafts": 1.0}


def test_untrained_model_scores_nothing() -> None:
    encoder = Encoder(FOLDER)
    model = Nano(model_config(encoder.tokenizer))
    initialise(model)
    assert judge.score(model, encoder, "echo", count=3, seed=1)["right"] == 0.0
