"""Memory for what a recorded step computes on the way.

A recording keeps the addresses of its tensors, so they cannot come from an allocator that gives
them away. Nor can every recording keep memory of its own: steps of all sizes together would take
gigabytes. So all recordings share this memory. While a step is recorded, a tensor's place is free
again as soon as the tensor is dropped; the next recording begins with everything free.

Law: what a recorded step returns is there until the next recorded step runs.
"""

import math
import weakref
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.graphs.recording import CaptureError

_ALIGNMENT = 64
# Virtual memory: only pages in use are real.
_CHUNK_BYTES = 64 << 20

Loans = Sequence[tuple[int, int]]
"""Address and size of each tensor that was made, in order."""


class Arena:
    """Lends memory for tensors on the host. One thread uses it."""

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.uint8]] = []
        self._free: list[tuple[int, int]] = []
        """Address and size of each free stretch, ascending: low addresses stay warm."""
        self._planned: Iterator[tuple[int, int]] | None = None
        self._generation = 0
        self._in_use = 0
        self._most_in_use = 0
        self.loans: list[tuple[int, int]] = []
        """What was lent since the last restart."""

    @property
    def most_in_use_bytes(self) -> int:
        """Most that was lent at one time."""
        return self._most_in_use

    def restart(self, plan: Loans | None = None) -> None:
        """Take everything back.

        Args:
            plan: The loans of a larger step: tensors get the same places, in the same order.
        """
        self._generation += 1
        self._in_use = 0
        self._free = sorted((_start(chunk), _usable(chunk)) for chunk in self._chunks)
        self._planned = None if plan is None else iter(plan)
        self.loans = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with any content, lent until it and all its views are dropped.

        Raises:
            CaptureError: The plan has no place for it.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        address = self._take(size) if self._planned is None else self._follow(size)
        self.loans.append((address, size))
        memory = self._view(address, num_bytes)
        if self._planned is None:
            # The tensor's storage holds the array, and so do all views of the tensor.
            loan = weakref.finalize(memory, self._give_back, address, size, self._generation)
            loan.atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def has(self, address: int) -> bool:
        """Whether an address is in this memory."""
        return any(0 <= address - chunk.ctypes.data < len(chunk) for chunk in self._chunks)

    def is_free(self, address: int) -> bool:
        """Whether an address is in this memory and not lent; with a plan nothing is known to be."""
        if self._planned is not None:
            return False
        place = bisect_right(self._free, address, key=itemgetter(0)) - 1
        return place >= 0 and address - self._free[place][0] < self._free[place][1]

    def _follow(self, size: int) -> int:
        assert self._planned is not None
        address, planned = next(self._planned, (0, 0))
        if size > planned:
            raise CaptureError(f"{size} bytes have no place in the plan, which has {planned} there")
        return address

    def _take(self, size: int) -> int:
        for place, (address, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[place]
                else:
                    self._free[place] = (address + size, free - size)
                self._in_use += size
                self._most_in_use = max(self._most_in_use, self._in_use)
                return address
        chunk = np.empty(max(size, _CHUNK_BYTES) + _ALIGNMENT, np.uint8)
        self._chunks.append(chunk)
        insort(self._free, (_start(chunk), _usable(chunk)))
        return self._take(size)

    def _view(self, address: int, size: int) -> NDArray[np.uint8]:
        for chunk in self._chunks:
            offset = address - chunk.ctypes.data
            if 0 <= offset < len(chunk):
                return chunk[offset : offset + size]
        raise AssertionError(f"address {address:#x} was never lent")

    def _give_back(self, address: int, size: int, generation: int) -> None:
        if generation != self._generation:
            return
        self._in_use -= size
        insort(self._free, (address, size))
        place = self._free.index((address, size))
        first = max(0, place - 1)
        merged = [self._free[first]]
        for start, length in self._free[first + 1 : place + 2]:
            last_start, last_length = merged[-1]
            if last_start + last_length == start:
                merged[-1] = (last_start, last_length + length)
            else:
                merged.append((start, length))
        self._free[first : place + 2] = merged


def _start(chunk: NDArray[np.uint8]) -> int:
    address: int = chunk.ctypes.data
    return -(-address // _ALIGNMENT) * _ALIGNMENT


def _usable(chunk: NDArray[np.uint8]) -> int:
    return (len(chunk) - _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
