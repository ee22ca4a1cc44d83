"""The inputs of a recorded step, at addresses that stay.

The number of sequences and the width of the block table are those of the largest step, whatever a
step has: sequences that are not there stand behind the others without tokens and without keys.
"""

import numpy as np
import torch
from torch import Tensor

from services.worker.model.metadata import StepMetadata
from services.worker.plan import Capacity


class StepBuffers:
    """Memory for one step on the host. One thread uses it."""

    def __init__(self, limits: Capacity, max_tokens: int, max_seqs: int) -> None:
        self.max_tokens = max_tokens
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64)
        self._slots = torch.zeros(max_tokens, dtype=torch.int32)
        self._ends = torch.zeros(max_seqs, dtype=torch.int32)
        self._lens = torch.zeros(max_seqs, dtype=torch.int32)
        self._table = torch.zeros((max_seqs, limits.max_blocks_per_row), dtype=torch.int32)
        tokens = (self._token_ids, self._positions, self._slots)
        self._of_tokens = [tensor.numpy() for tensor in tokens]
        self._of_seqs = [tensor.numpy() for tensor in (self._ends, self._lens)]
        self._blocks = self._table.numpy()

    def fill(self, token_ids: Tensor, step: StepMetadata) -> None:
        """Copy a step into the buffers."""
        # Not len: of a tensor it takes as long as a copy here.
        num_tokens, num_seqs = token_ids.shape[0], step.seq_lens.shape[0]
        sources = (token_ids, step.positions, step.slot_mapping)
        for target, source in zip(self._of_tokens, sources, strict=True):
            target[:num_tokens] = source.numpy()
        for target, source, filler in zip(
            self._of_seqs, (step.cum_query_lens, step.seq_lens), (num_tokens, 0), strict=True
        ):
            target[:num_seqs] = source.numpy()
            target[num_seqs:] = filler
        table = step.block_table.numpy()
        np.copyto(self._blocks[:num_seqs, : table.shape[1]], table)

    def step(self, num_tokens: int) -> tuple[Tensor, StepMetadata]:
        """Token ids and metadata of so many tokens."""
        metadata = StepMetadata(
            num_tokens=num_tokens,
            positions=self._positions[:num_tokens],
            slot_mapping=self._slots[:num_tokens],
            cum_query_lens=self._ends,
            seq_lens=self._lens,
            block_table=self._table,
        )
        return self._token_ids[:num_tokens], metadata
