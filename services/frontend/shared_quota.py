"""Bounds of API keys over all processes of a gateway: they count together, in files of a folder.

Each process has a row of its own in the file of each key, and owns it for life (`owners`).
Who lets a request in holds the lock of the key's file meanwhile, for some microseconds, so no bound
is ever passed by one. The kernel gives locks back when a process ends, however it ends; a row whose
lock is free is nobody's, whatever it says. So a lost process leaves nothing behind: no counts, no
locks.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from services.frontend.owners import OwnerLocks
from services.frontend.quota import Clock, KeyBounds, Leave
from shared.errors import ConfigError, FailureReason, RequestError

MAX_PROCESSES: Final = 256
# Others hold a key's lock for microseconds; who holds it longer stands still.
LOCK_TIMEOUT_S: Final = 1.0
LOCK_RETRY_S: Final = 0.001
# An empty bucket is full again after so long. A clock that is further back has begun anew, with the
# machine.
FULL_S: Final = 60.0
# What is left of the rate and when that was true (monotonic, one clock for all processes of a
# machine; 0 in a new file), then the running requests of each row.
_BUCKET: Final = struct.Struct("<dd")
_ROWS: Final = struct.Struct(f"<{MAX_PROCESSES}I")
_COUNT: Final = struct.Struct("<I")
_SIZE: Final = _BUCKET.size + _ROWS.size


class SharedCounts:
    """A folder of counts, and this process's row in its files."""

    def __init__(self, folder: Path) -> None:
        """Claim a row; `ConfigError` when the folder cannot be used."""
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._rows = OwnerLocks(folder / "rows")
            self.row = self._claim()
        except OSError as error:
            raise ConfigError(f"--key-limits-path {folder}: {error.strerror}") from None

    def quota(self, digest: bytes, bounds: KeyBounds) -> "SharedQuota":
        """The counts of one key; `ConfigError` when its file cannot be used."""
        name = hashlib.sha256(b"glm-mesh counts " + digest).hexdigest()[:32]
        try:
            return SharedQuota(self, self._folder / f"{name}.key", bounds)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--key-limits-path {self._folder}: {error}") from None

    def close(self) -> None:
        """Give the row back; its counts are worth nothing from now on. Idempotent."""
        self._rows.close()

    def is_alive(self, row: int) -> bool:
        """Whether a process holds a row."""
        return row == self.row or self._rows.is_held_elsewhere(row)

    def _claim(self) -> int:
        for row in range(MAX_PROCESSES):
            if self._rows.claim(row):
                return row
        raise ConfigError(
            f"--key-limits-path {self._folder}: {MAX_PROCESSES} processes count there already"
        )


class SharedQuota:
    """The counts of one key over all processes."""

    def __init__(self, counts: SharedCounts, path: Path, bounds: KeyBounds) -> None:
        """Open the file; what an earlier process of this row left there is forgotten."""
        self._counts = counts
        self._bounds = bounds
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size < _SIZE:
            os.ftruncate(self._file, _SIZE)  # never shortens, so two may do it at once
        self._page = mmap.mmap(self._file, _SIZE)
        self._set_count(counts.row, 0)

    @property
    def num_running(self) -> int:
        """Requests in work, as far as the files know."""
        return sum(self._rows())

    async def enter(self, clock: Clock) -> Leave:
        """Take a request."""
        async with self._locked():
            self._check_running()
            # Not a time from before the wait: what others have refilled since would come twice.
            self._take_one(clock())
            self._add(1)
        return self._leave

    def _check_running(self) -> None:
        try:
            self._bounds.check_running(self.num_running)
        except RequestError:
            for row, count in enumerate(self._rows()):
                if count and not self._counts.is_alive(row):
                    self._set_count(row, 0)
            self._bounds.check_running(self.num_running)

    def _take_one(self, now: float) -> None:
        if self._bounds.per_minute is None:
            return
        num_left, seen_at = _BUCKET.unpack_from(self._page)
        if not seen_at:
            num_left = self._bounds.per_minute
        if now > seen_at - FULL_S:
            now = max(now, seen_at)  # a step back is no time to be refilled again
        num_left = self._bounds.refilled(num_left, now - seen_at)
        is_left = num_left >= 1
        _BUCKET.pack_into(self._page, 0, num_left - is_left, now)
        if not is_left:
            self._bounds.check_rate(num_left)

    def _leave(self) -> None:
        # Nobody else writes this row, and who reads the old number only refuses once too often.
        self._add(-1)

    def _add(self, change: int) -> None:
        row = self._counts.row
        self._set_count(row, self._rows()[row] + change)

    def _rows(self) -> tuple[int, ...]:
        return _ROWS.unpack_from(self._page, _BUCKET.size)

    def _set_count(self, row: int, count: int) -> None:
        _COUNT.pack_into(self._page, _BUCKET.size + row * _COUNT.size, count)

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """The key's file is ours; not for long, nothing inside may wait."""
        give_up_at = time.monotonic() + LOCK_TIMEOUT_S
        while not _lock(self._file):
            if time.monotonic() > give_up_at:
                raise RequestError(
                    FailureReason.UPSTREAM_LOST,
                    "the counts of this API key cannot be reached: another process holds them",
                    retry_after_ms=1000,
                )
            await asyncio.sleep(LOCK_RETRY_S)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _lock(file: int) -> bool:
    """Take the lock of a file if it is free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
