"""A decoder without weights whose logits depend on every token of the sequence, in order.

It reads its context through slots and block tables alone, so a wrong slot, table, length or
position changes the output.
"""

import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.worker.model.metadata import StepMetadata
from services.worker.model_executor import ModelExecutor
from services.worker.plan import Capacity
from tests.services.worker.plans import make_capacity

# A prime below 2**20: a hash is one float32 without rounding.
_HASHES = 1_048_573


class FakeDecoder:
    def __init__(self, capacity: Capacity, *, vocab_size: int | None = None) -> None:
        self.block_size = capacity.block_size
        self.vocab_size = vocab_size or capacity.vocab_size
        self.change: Callable[[Tensor], None] = lambda logits: None
        self.steps: list[StepMetadata] = []
        self.num_head_rows: list[int] = []

    def forward(self, token_ids: Tensor, step: StepMetadata, caches: Tensor) -> Tensor:
        self.steps.append(step)
        assert int(step.cum_query_lens[-1]) == step.num_tokens == len(token_ids)
        caches[step.slot_mapping.long()] = token_ids
        hidden = torch.zeros(step.num_tokens, 1)
        start = 0
        for index, end in enumerate(step.cum_query_lens.tolist()):
            length = int(step.seq_lens[index])
            if length:
                context = self._context(caches, step.block_table[index].numpy(), length)
                for place in range(start, end):
                    position = int(step.positions[place])
                    assert position == length - (end - place)
                    hidden[place] = zlib.crc32(context[: position + 1].tobytes()) % _HASHES
            start = end
        return hidden

    def _context(self, caches: Tensor, table: np.ndarray, length: int) -> np.ndarray:
        places = np.arange(length)
        slots = table[places // self.block_size] * self.block_size + places % self.block_size
        assert slots.min() >= self.block_size, "a sequence reads the scratch block"
        return caches.numpy()[slots]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.num_head_rows.append(len(hidden))
        ramp = 1.0 + torch.arange(self.vocab_size)
        logits = 3 * torch.sin(hidden * 0.618 + hidden % 7919 * ramp * 0.713)
        self.change(logits)
        return logits


def make_executor(
    *,
    row_multiple: int = 1,
    vocab_size: int | None = None,
    num_known_ids: int | None = None,
    **capacity: int,
) -> ModelExecutor[Tensor]:
    limits = make_capacity(**capacity)
    return ModelExecutor(
        FakeDecoder(limits, vocab_size=vocab_size),
        torch.full((limits.num_blocks * limits.block_size,), -1, dtype=torch.int64),
        limits,
        num_known_ids=num_known_ids or limits.vocab_size,
        device=torch.device("cpu"),
        row_multiple=row_multiple,
    )
