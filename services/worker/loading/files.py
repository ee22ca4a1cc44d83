"""Opens and reads files of a checkpoint; every failure is a `CheckpointError` that names the file.

Reads go through `pread`, not through mapped memory: an I/O error or a file cut short by somebody
else is then an exception here and not a signal that ends the process.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shared.errors import CheckpointError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file, and what tells whether it is still the same one."""

    path: Path
    num_bytes: int
    inode: tuple[int, int]
    modified_ns: int


def open_regular(path: Path) -> tuple[int, WeightFile]:
    """A descriptor to read from, which the caller closes, and what the file is now.

    Raises:
        CheckpointError: The file is missing, unreadable, or no regular file.
    """
    try:
        # A pipe with nobody at its other end would block here for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file")
    return descriptor, WeightFile(
        path=path,
        num_bytes=status.st_size,
        inode=(status.st_dev, status.st_ino),
        modified_ns=status.st_mtime_ns,
    )


class FileCursor:
    """Reads from one file at a time, the last one used. Each thread has its own."""

    def __init__(self, *, is_exact: bool = False) -> None:
        """Get ready.

        Args:
            is_exact: The system reads no page ahead by itself. That is for those who ask for
                megabytes at a time, from several threads: what lies behind a range they ask for
                may be another rank's.
        """
        self._is_exact = is_exact
        self._file: WeightFile | None = None
        self._descriptor = -1
        self.num_bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file in use; the cursor can be used again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._file = -1, None

    def read(self, file: WeightFile, offset: int, target: Bytes, name: str = "") -> None:
        """Fill `target` from `offset` on; `name` is the tensor's, for messages.

        Raises:
            CheckpointError: The file changed since it was first opened, or cannot be read.
        """
        if file is not self._file:
            self._open(file)
        view, done = target.data, 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                where = _where(file, name)
                raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
            if not count:
                where = _where(file, name)
                raise CheckpointError(f"{where}: is truncated: ends at byte {offset + done}")
            done += count
        self.num_bytes_read += done

    def _open(self, file: WeightFile) -> None:
        self.close()
        self._descriptor, now = open_regular(file.path)
        self._file = file
        if now != file:
            self.close()
            raise CheckpointError(f"{file.path}: was changed while it was being read")
        if self._is_exact:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def _where(file: WeightFile, name: str) -> str:
    return f"{file.path}: {name}" if name else str(file.path)
