"""Memory that tensors are read into, used again once the last view of it is gone.

Fresh memory must be zeroed by the system page by page: reading into it runs at half the speed.
What is given up goes back to the system at once: malloc would keep up to 64 MiB for each thread
that asked, for as long as the process lives.
"""

import contextlib
import mmap
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# A buffer is not spent on something much smaller, which would waste the rest of it.
_MAX_WASTE = 2
# Smaller ones are malloc's: a mapping of its own would waste most of a page.
_MIN_MAPPED_BYTES = 1 << 16
# From here on large pages, as numpy does: a hundredth of the faults.
_MIN_HUGE_BYTES = 4 << 20


def fresh(num_bytes: int) -> Bytes:
    """New memory with anything in it, which is the system's again when the array is gone.

    Raises:
        MemoryError: There is not so much.
    """
    if num_bytes < _MIN_MAPPED_BYTES:
        return np.empty(num_bytes, np.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        text = f"no memory to read into: {num_bytes} bytes, {error.strerror}"
        raise MemoryError(text) from None
    if num_bytes >= _MIN_HUGE_BYTES:
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class BufferPool:
    """Hands out buffers; one caller at a time.

    A buffer comes back by itself when nothing refers to what was handed out any more, so a tensor
    that somebody keeps is never written to again.
    """

    def __init__(self, max_bytes: int) -> None:
        """Free buffers are kept as long as these and those in use stay within `max_bytes`."""
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._free: list[Bytes] = []
        # Buffers come back wherever their last view dies, in any thread, even inside `take`: all
        # that may happen there is one atomic call.
        self._returned: deque[Bytes] = deque()

    def take(self, num_bytes: int) -> Bytes:
        """A buffer of exactly this size (at least 1), with anything in it."""
        self._collect()
        whole = self._reuse(num_bytes)
        if whole is None:
            self._shrink(self._max_bytes - self._used_bytes - num_bytes)
            whole = fresh(num_bytes)
        self._used_bytes += whole.nbytes
        # The view is what lives and dies: tensors made of it keep it, and so do slices, whose base
        # it is because its own is no array (a slice of a plain slice would keep `whole` alone).
        view = np.frombuffer(whole.data, np.uint8, num_bytes)
        weakref.finalize(view, self._returned.append, whole).atexit = False
        return view

    def clear(self) -> None:
        """Drop what is free."""
        self._collect()
        self._shrink(0)

    @property
    def num_free_bytes(self) -> int:
        """Memory kept for later use."""
        return sum(buffer.nbytes for buffer in self._free)

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._used_bytes -= buffer.nbytes
            self._free.append(buffer)

    def _reuse(self, num_bytes: int) -> Bytes | None:
        """The smallest free buffer that fits."""
        sizes = [
            (buffer.nbytes, index)
            for index, buffer in enumerate(self._free)
            if num_bytes <= buffer.nbytes <= _MAX_WASTE * num_bytes
        ]
        return self._free.pop(min(sizes)[1]) if sizes else None

    def _shrink(self, max_free_bytes: int) -> None:
        """Drop free buffers, the oldest first."""
        while self._free and self.num_free_bytes > max_free_bytes:
            self._free.pop(0)
