"""Buffers between the host, where a step is written, and the device, where the model reads it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.plan import Capacity


class StagingBuffer:
    """A host array that the step is written into, and the device tensor that the model reads.

    On a CPU both are the same memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        host = torch.zeros(shape, dtype=dtype)
        self.array: NDArray[np.generic] = host.numpy()
        self._host = host
        self._device = host.to(device)
        self._part = self._device

    def send(self, count: int) -> Tensor:
        """The first `count` entries on the device."""
        if len(self._part) != count:  # steady decoding asks for the same part at every step
            self._part = self._device[:count]
        part = self._part
        if self._device is not self._host:
            # The result of the last step was read back, so nothing still reads the host's copy.
            part.copy_(self._host[:count], non_blocking=True)
        return part


class StepStaging:
    """The buffers of a step's tokens and sequences."""

    def __init__(
        self, limits: Capacity, num_tokens: int, num_seqs: int, device: torch.device
    ) -> None:
        def of(count: int, dtype: torch.dtype) -> StagingBuffer:
            return StagingBuffer((count,), dtype, device)

        self.token_ids = of(num_tokens, torch.int64)
        self.positions = of(num_tokens, torch.int64)
        self.slots = of(num_tokens, torch.int32)
        self.cum_query_lens = of(num_seqs, torch.int32)
        self.seq_lens = of(num_seqs, torch.int32)
        # Flat, so that a step's table is contiguous at any width. Drafts that stay dead may stand
        # past the longest sequence.
        longest = limits.max_model_len + limits.num_speculative_tokens
        self.max_blocks = -(-longest // limits.block_size)
        self.tables = of(num_seqs * self.max_blocks, torch.int32)
