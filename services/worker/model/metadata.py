"""What one step tells the model about its tokens and their places in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.parallel.moe_method import MoeMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraffic:
    """How the tokens of a step reach experts on other ranks: the same for all ranks of a world."""

    method: MoeMethod
    num_tokens: int
    """Of the replica with the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """One flattened step, prefill chunks and decodes mixed: T tokens of R sequences.

    ``cum_query_lens[-1]`` must equal T. Padding tokens belong to a last sequence with
    ``seq_lens`` 0, so that they select nothing and attend to nothing.
    """

    num_tokens: int
    """T, padding included."""
    positions: Tensor
    """[T] int64, place of each token in its own sequence."""
    slot_mapping: Tensor
    """[T] int32, cache slot of each token; padding tokens point into scratch block 0."""
    cum_query_lens: Tensor
    """[R] int32, inclusive prefix sum of the tokens per sequence."""
    seq_lens: Tensor
    """[R] int32, KV length of each sequence after this step."""
    block_table: Tensor
    """[R, max_blocks] int32, block ids of each sequence."""
    traffic: ExpertTraffic | None = None
    """None: all ranks see the same tokens, or as many of their own."""
    is_captured: bool = False
    """Whether it is a decode step of a captured size, in the buffers that every such step is in."""

    def of_tokens(self, tokens: Tensor) -> StepMetadata:
        """A step of some of the tokens that sees what they see; each is a sequence of its own.

        Args:
            tokens: [S] int64, their places in this step.
        """
        positions = self.positions[tokens]
        sequences = torch.searchsorted(self.cum_query_lens, tokens.to(torch.int32), right=True)
        count = tokens.shape[0]
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=tokens.device)
        return StepMetadata(
            num_tokens=count,
            positions=positions,
            slot_mapping=self.slot_mapping[tokens],
            cum_query_lens=ends,
            seq_lens=(positions + 1).to(torch.int32),
            block_table=self.block_table[sequences],
        )
