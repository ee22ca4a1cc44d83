"""What a system is told about memory: large pages, and pages that will be needed soon.

With pages of 4 KiB, half of the time of a stream from one end to the other may go into finding
them.
"""

import ctypes
import errno
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

_LEAST_BYTES = 4 << 20
"""Large pages lie on addresses of their own size, 2 MiB on most machines."""
# Linux 5.14: as if every page were written to, its contents unchanged. Python 3.11 has no name.
_POPULATE_WRITE = 23


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask for large pages, before the memory is written. It is advice: nothing fails without."""
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST_BYTES:
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise()(first, last - first, mmap.MADV_HUGEPAGE)


def populate(tensor: Tensor, first: int, last: int) -> int:
    """Have the system give the memory of these bytes of a tensor on the CPU, its contents as are.

    Returns:
        0, or the system's error number: EINVAL where it cannot, ENOMEM where there is none left.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # no Linux
        return errno.EINVAL
    start = (tensor.data_ptr() + first) // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + last) // mmap.PAGESIZE) * mmap.PAGESIZE
    return ctypes.get_errno() if _advise()(start, end - start, _POPULATE_WRITE) else 0


@functools.cache
def _advise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise.restype = ctypes.c_int
    return advise
