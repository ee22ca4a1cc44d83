"""Judges a model in training: exact match of whole answers, without generating.

An answer is right when every token of it is the most likely one given the right tokens before;
greedy decoding then says exactly that answer.
"""

import random

import torch
from torch import Tensor

from tools.nano.data import Encoder
from tools.nano.model import Mode, Nano, Trace, causal_mask
from tools.nano.tasks import make_episode
from tools.nano.words import Split


@torch.no_grad()
def score(
    model: Nano, encoder: Encoder, skill: str, *, count: int, seed: int,
    mode: Mode = "dense", size: int | None = None, split: Split = "eval",
) -> dict[str, float]:  # fmt: skip
    """Returns the share of right answers, of right tokens, and of right first drafts."""
    rng = random.Random(f"{skill}/{seed}")
    right, tokens, right_tokens, drafts, right_drafts = 0, 0, 0, 0, 0
    for _ in range(count):
        episode = make_episode(skill, rng, split, size=size)
        ids, weights = encoder.encode(episode)
        start = len(ids) - next(i for i, w in enumerate(reversed(weights)) if not w)
        says = torch.tensor(weights[start:]).bool()
        rows = torch.tensor([ids])
        best, draft = _predictions(model, rows, mode)
        hits = best[start - 1 : -1][says] == rows[0, start:][says]
        right += int(hits.all())
        tokens += hits.numel()
        right_tokens += int(hits.sum())
        wanted = best[start:-1]
        drafts += wanted.numel()
        right_drafts += int((draft[start - 1 :][: wanted.numel()] == wanted).sum())
    return {
        "right": right / count,
        "tokens": right_tokens / max(tokens, 1),
        "drafts": right_drafts / max(drafts, 1),
    }  # fmt: skip


def _predictions(model: Nano, rows: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """Returns the choice after each position, and the draft of the choice after the next."""
    with torch.autocast("cpu", torch.bfloat16):
        documents = torch.zeros_like(rows)
        hidden = model.trunk(rows, Trace(mode, causal_mask(documents)))
        best = model.lm_head(hidden)[0].argmax(-1)
        drafted = model.draft(rows, hidden, documents, Trace(mode, causal_mask(documents[:, 1:])))
        return best, model.lm_head(drafted)[0].argmax(-1)
