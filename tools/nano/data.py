"""Turns episodes into rows of token ids, and says which of them the model itself would say.

Rows are packed: several episodes share a row and `documents` numbers them, so that attention can be
kept inside each.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.nano.episode import Episode
from tools.nano.tasks import make_episode
from tools.nano.template import ChatTemplate
from tools.nano.words import Split

PATIENCE = 12


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, all [B, T]: ids, weight of predicting each, number of the episode it is in."""

    ids: Tensor
    weights: Tensor
    documents: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What a batch is made of: shape, share of each skill, and how long look-ups and echoes are."""

    rows: int
    length: int
    skills: dict[str, float]
    lines: tuple[int, int] = (3, 10)
    longest_echo: int = 12
    max_turns: int = 4


class Encoder:
    """Renders and tokenizes episodes of a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        """Loads the tokenizer and the template."""
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = ChatTemplate(folder)
        self._ids = {
            token: self.tokenizer.token_to_id(token)
            for token in (
                "<|user|>",
                "<|assistant|>",
                "<|observation|>",
                "<think>",
                "</think>",
                "<|endoftext|>",
            )
        }

    @property
    def pad_id(self) -> int:
        """The id that fills rows."""
        return self._ids["<|endoftext|>"]

    def encode(self, episode: Episode) -> tuple[list[int], list[float]]:
        """Returns ids and weights; the last turn is closed by the stop token GLM would say."""
        text = self.template.render(
            episode.messages,
            episode.tools,
            add_generation_prompt=False,
            enable_thinking=episode.thinking,
        )
        text += "<|observation|>" if episode.messages[-1].get("tool_calls") else "<|user|>"
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids, self._weights(ids, thinking=episode.thinking)

    def _weights(self, ids: list[int], *, thinking: bool) -> list[float]:
        """Marks what the model says: after `<think>` where it thinks now, else `</think>`."""
        last_user = max(i for i, token in enumerate(ids[:-1]) if token == self._ids["<|user|>"])
        weights = [0.0] * len(ids)
        speaking = False
        for index, token in enumerate(ids):
            weights[index] = float(speaking)
            if token in (self._ids["<|user|>"], self._ids["<|observation|>"]):
                speaking = False
            elif (
                token == self._ids["<think>"] and thinking and index > last_user
            ) or token == self._ids["</think>"]:
                speaking = True
        return weights


def draw(rng: random.Random, mix: Mix, split: Split = "train") -> Episode:
    """Draws one episode of a mix."""
    skill = rng.choices(list(mix.skills), list(mix.skills.values()))[0]
    size = None
    turns = rng.randint(1, mix.max_turns)
    if skill == "lookup":
        size = rng.randint(*mix.lines)
        turns = rng.randint(1, 2 * mix.max_turns)
    elif skill == "echo":
        size = rng.randint(2, mix.longest_echo)
    return make_episode(skill, rng, split, turns=turns, size=size)


def make_batch(encoder: Encoder, rng: random.Random, mix: Mix, split: Split = "train") -> Batch:
    """Fills rows first-fit with episodes until many in a row no longer fit."""
    ids = torch.full((mix.rows, mix.length), encoder.pad_id)
    weights = torch.zeros(mix.rows, mix.length)
    documents = torch.full((mix.rows, mix.length), -1)
    used, number, misses = [0] * mix.rows, 0, 0
    while misses < PATIENCE:
        tokens, token_weights = encoder.encode(draw(rng, mix, split))
        size = len(tokens)
        if size > mix.length:
            continue
        row = next((r for r in range(mix.rows) if used[r] + size <= mix.length), None)
        if row is None:
            misses += 1
            continue
        misses = 0
        place = slice(used[row], used[row] + size)
        ids[row, place] = torch.tensor(tokens)
        weights[row, place] = torch.tensor(token_weights)
        documents[row, place] = number
        used[row] += size
        number += 1
    return Batch(ids, weights, documents)
