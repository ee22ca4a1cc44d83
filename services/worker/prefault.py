"""Memory of the KV blocks is taken from the system before they are used, in the background.

The first write to a fresh page waits until the system has cleared it, and in a virtual machine
until the host has as well: 0.2 to 5 ms for 2 MiB, in the middle of a step. To take all of it before
the worker is ready would cost up to a second for each 512 MiB, so a thread does that afterwards, in
the order in which blocks are given out.

Law: it takes at most half of a core. It has the priority of the others all the same: meanwhile the
system lets no other thread change the process's memory map, and would not for long if this one did
not get its turn.
"""

import errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from services.worker.kv_cache import KVCaches
from services.worker.ops.pages import populate
from shared.log import get_logger

_log = get_logger(__name__)

# Of the widest tensor at a time: a large page, which is the least that a system gives.
_PIECE_BYTES: Final = 2 << 20


def prefault(caches: KVCaches) -> threading.Thread:
    """Start to take the memory of caches on a CPU; the thread ends early once they are gone."""
    tensors = [tensor for tensor in caches.tensors() if tensor.device.type == "cpu"]
    widest = max((tensor.nbytes for tensor in tensors), default=1)
    blocks_at_once = max(1, _PIECE_BYTES * caches.num_blocks // widest)
    args = ([weakref.ref(tensor) for tensor in tensors], caches.num_blocks, blocks_at_once)
    thread = threading.Thread(target=_take, args=args, name="prefault", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _log.warning("no thread to take the KV blocks' memory ahead of use: %s", error)
    return thread


def _take(tensors: Sequence["weakref.ref[Tensor]"], num_blocks: int, step: int) -> None:
    for first in range(0, num_blocks, step):
        last = min(first + step, num_blocks)
        for ref in tensors:
            tensor = ref()
            if tensor is None:
                return
            each = tensor.nbytes // num_blocks
            started = time.monotonic()
            if error := populate(tensor, first * each, last * each):
                _tell(error, first, num_blocks)
                return
            del tensor
            time.sleep(time.monotonic() - started)


def _tell(error: int, num_taken: int, num_blocks: int) -> None:
    if error == errno.EINVAL:
        _log.debug("this system gives memory as it is used")
        return
    _log.warning(
        "the system has no memory left for KV blocks",
        extra={"num_blocks": num_blocks, "num_taken": num_taken, "error": os.strerror(error)},
    )
