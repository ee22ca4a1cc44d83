"""What a service wrote: new lines for the terminal, last lines for the report of a death.

A log that has grown to its limit becomes `NAME.log.1`, in the place of an older one, and starts
again: a mesh that runs for months takes twice the limit per service.
"""

import os
import shutil
from pathlib import Path
from typing import Final

MAX_TAIL_BYTES: Final = 16_384
MAX_LINES_PER_LOOK: Final = 20
MAX_LOG_BYTES: Final = 64 << 20
_LOUD: Final = (" WARNING ", " ERROR ", " CRITICAL ")


class LogTail:
    """One log file that its service appends to."""

    def __init__(self, path: Path) -> None:
        """Start at the end of what is there."""
        self.path = path
        self._seen = self._size()
        self._mark = self._seen
        self._is_loud = False

    def mark(self) -> None:
        """Call at each start of the service: `last_lines` goes back no further."""
        self._mark = self._size()

    def last_lines(self, count: int) -> list[str]:
        """The last lines since the mark."""
        lines = self._read(max(self._mark, self._size() - MAX_TAIL_BYTES)).splitlines()
        return lines[-count:]

    def new_loud_lines(self) -> list[str]:
        """Warnings and errors since the last look, tracebacks included, bounded."""
        data = self._read(self._seen)
        complete = data[: data.rfind("\n") + 1]
        self._seen += len(complete.encode("utf-8", "surrogateescape"))
        loud = [line for line in complete.splitlines() if self._counts(line)]
        if len(loud) > MAX_LINES_PER_LOOK:
            more = len(loud) - MAX_LINES_PER_LOOK
            loud[MAX_LINES_PER_LOOK:] = [f"... {more} more lines in {self.path}"]
        return loud

    def rotate(self, limit: int = MAX_LOG_BYTES) -> None:
        """Set a log of `limit` bytes or more aside.

        The service appends to the open file, so it is emptied, not moved; a line written between
        copying and emptying is lost.
        """
        if self._size() < limit:
            return
        shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
        os.truncate(self.path, 0)
        self._seen = self._mark = 0

    def _counts(self, line: str) -> bool:
        """Lines that start with a blank belong to the record above them."""
        if not line.startswith(" "):
            head = line[:80]
            self._is_loud = any(word in head for word in _LOUD)
        return self._is_loud

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _read(self, start: int) -> str:
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20).decode("utf-8", "surrogateescape")
