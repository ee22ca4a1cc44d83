"""Large pages for memory that a step reads from one end to the other.

With pages of 4 KiB, half of a stream's time may go into finding them.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

_LEAST_BYTES = 4 << 20
"""Large pages lie on addresses of their own size, 2 MiB on most machines."""


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask for large pages, before the memory is written. It is advice: nothing fails without."""
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST_BYTES:
        return
    advise = _advise()
    if advise is not None:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(first, last - first, mmap.MADV_HUGEPAGE)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's call, where there is one."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise.restype = ctypes.c_int
    return advise
