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
        logits = _logits(hidden, self.vocab_size)
        self.change(logits)
        return logits


def _logits(hidden: Tensor, vocab_size: int) -> Tensor:
    ramp = 1.0 + torch.arange(vocab_size)
    return 3 * torch.sin(hidden * 0.618 + hidden % 7919 * ramp * 0.713)


class FakeDrafter(FakeDecoder):
    """Knows what the decoder says next, and tells it at a share of all contexts.

    Which contexts those are depends on their tokens alone. It reads them from its own cache, which
    lies behind the main one: a draft that is wrong elsewhere comes from a gap there. It checks that
    it is given the right states: the decoder's at first, then its own.
    """

    def __init__(self, capacity: Capacity, *, vocab_size: int | None, skill: float) -> None:
        super().__init__(capacity, vocab_size=vocab_size)
        self.skill = skill
        self.num_passes = 0
        self._states = torch.zeros(capacity.num_blocks * capacity.block_size)
        self._at_first: StepMetadata | None = None

    def is_right(self, context: list[int]) -> bool:
        """Whether the draft behind these tokens is the likeliest one."""
        return zlib.crc32(np.array(context, np.int64).tobytes()) % 997 < 997 * self.skill

    def forward(self, token_ids: Tensor, step: StepMetadata, caches: Tensor) -> Tensor:
        self._at_first = step
        return super().forward(token_ids, step, caches[: len(self._states)])

    def draft(
        self, token_ids: Tensor, hidden: Tensor, step: StepMetadata, caches: Tensor
    ) -> Tensor:
        assert int(step.cum_query_lens[-1]) == step.num_tokens == len(token_ids) == len(hidden)
        main, own = caches.split(len(self._states))
        slots = step.slot_mapping.long()
        assert len(set(slots.tolist())) == len(slots), "two tokens go into one slot"
        own[slots] = token_ids
        states, start = torch.zeros(step.num_tokens, 1), 0
        for index, end in enumerate(step.cum_query_lens.tolist()):
            length = int(step.seq_lens[index])
            table = step.block_table[index].numpy()
            for place in range(start, end) if length else ():
                position = int(step.positions[place])
                assert position == length - (end - place)
                # Its own row at a position holds the token behind it; the first is the decoder's.
                context = np.append(
                    self._context(main, table, 1), self._context(own, table, position + 1)
                )
                if step is not self._at_first:
                    before = (position - 1) % self.block_size
                    before += table[(position - 1) // self.block_size] * self.block_size
                    assert hidden[place] == self._states[before]
                elif np.array_equal(context[:-1], self._context(main, table, position + 1)):
                    # Elsewhere a draft was rejected, and its state means nothing.
                    assert hidden[place] == zlib.crc32(context[:-1].tobytes()) % _HASHES
                right = zlib.crc32(context.tobytes()) % _HASHES
                states[place] = right if self.is_right(context.tolist()) else -1.0 - right
            start = end
        self._states[slots] = states[:, 0]
        self._at_first, self.num_passes = None, self.num_passes + 1
        return states

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        """The decoder's own logits; the worst token where the draft is to be wrong."""
        is_right = (hidden >= 0).float() * 2 - 1
        return is_right * _logits(torch.where(hidden >= 0, hidden, -1.0 - hidden), self.vocab_size)


def make_executor(
    *,
    row_multiple: int = 1,
    vocab_size: int | None = None,
    num_known_ids: int | None = None,
    skill: float = 0.8,
    **capacity: int,
) -> ModelExecutor[Tensor]:
    """An executor whose drafts are right at a share `skill` of all contexts."""
    limits = make_capacity(**capacity)
    decoder = FakeDrafter(limits, vocab_size=vocab_size, skill=skill)
    return ModelExecutor(
        decoder,
        torch.full((2 * limits.num_blocks * limits.block_size,), -1, dtype=torch.int64),
        limits,
        num_known_ids=num_known_ids or limits.vocab_size,
        device=torch.device("cpu"),
        row_multiple=row_multiple,
        drafter=decoder,
    )
