"""Which processes that share a file are alive: each holds the lock of one byte for life.

The kernel gives the lock back when its process ends, however it ends. Numbers are never given out
twice, so a new process is not taken for a lost one. The locks belong to the open file (`F_OFD_*`),
not to the process: another open of the file in the same process does not give them up.
"""

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

# `struct flock` of 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("@hhqqi4x")


class OwnerLocks:
    """The file of locks, and this process's place in it."""

    def __init__(self, path: Path) -> None:
        """Open or create; `OSError` where that cannot be."""
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def claim(self, number: int) -> bool:
        """Hold the lock of a number from now on; false where another has it."""
        assert self._file is not None
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _record(fcntl.F_WRLCK, number))
        except BlockingIOError:
            return False
        return True

    def is_held_elsewhere(self, number: int) -> bool:
        """Whether another open file holds the lock of a number."""
        assert self._file is not None
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _record(fcntl.F_WRLCK, number))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _record(kind: int, number: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0)
