"""Finished responses, kept for a while: bounded in number, bytes and age.

One table of SQLite, in memory or in a file that several processes of the gateway share. Whatever is
over a bound pushes the oldest out. A response belongs to the key that made it: under any other it
does not exist. One that was deleted stays so, though its answer may still be under way, in any
process. All work is done by one thread, in order, off the event loop.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from shared.log import get_logger

T = TypeVar("T")

_logger = get_logger(__name__)

_BUSY_S: Final = 5.0
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, tenant TEXT, expires REAL,
    size INTEGER, object BLOB, input BLOB
)"""
_DELETED_TABLE: Final = """
CREATE TABLE IF NOT EXISTS deleted (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE)"""
# Each id matters until the last word of its answer has come, which a deletion hurries.
MAX_DELETED: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The object as JSON, and the input items that led to it as a JSON list."""

    object_json: bytes
    input_json: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBounds:
    """What the store holds at most; each at least 1."""

    max_responses: int
    max_bytes: int
    ttl_s: float


class ResponseTable:
    """The table itself; not for several threads.

    Args:
        path: A file, created if it is not there; None keeps it in memory.
        bounds: Of all processes together.
    """

    def __init__(self, path: Path | None, bounds: StoreBounds) -> None:
        """Open or create."""
        self._bounds = bounds
        self._db = sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        if path is not None:
            path.chmod(0o600)  # what people said to the model
            self._db.execute("PRAGMA journal_mode=WAL")
            # A crash of the machine may lose the last ones; a crash of the process does not.
            self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(_TABLE)
        self._db.execute(_DELETED_TABLE)

    def put(self, response_id: str, tenant: str, stored: StoredResponse, now: float) -> bool:
        """Keep a response in place of its earlier state.

        Returns:
            False when it alone is too large, or was deleted.
        """
        size = len(stored.object_json) + len(stored.input_json)
        if size > self._bounds.max_bytes:
            return False
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if self._is_deleted(response_id):
                return False
            self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            values = (response_id, tenant, now + self._bounds.ttl_s, size)
            self._db.execute(
                "INSERT INTO responses (id, tenant, expires, size, object, input)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (*values, stored.object_json, stored.input_json),
            )
            self._push_out(now)
        return True

    def get(self, response_id: str, tenant: str, now: float) -> StoredResponse | None:
        """A response of this tenant that is still there."""
        row = self._db.execute(
            "SELECT object, input FROM responses WHERE id = ? AND tenant = ? AND expires > ?",
            (response_id, tenant, now),
        ).fetchone()
        return None if row is None else StoredResponse(object_json=row[0], input_json=row[1])

    def delete(self, response_id: str, tenant: str, now: float) -> bool:
        """Forget a response; whether it was there."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            found = self._db.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ? AND expires > ?",
                (response_id, tenant, now),
            )
            if found.rowcount > 0:
                self._remember_deleted(response_id)
        return found.rowcount > 0

    def totals(self) -> tuple[int, int]:
        """How many responses there are and how many bytes they have."""
        count, size = self._db.execute("SELECT COUNT(*), SUM(size) FROM responses").fetchone()
        return int(count), int(size or 0)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _is_deleted(self, response_id: str) -> bool:
        found = self._db.execute("SELECT 1 FROM deleted WHERE id = ?", (response_id,))
        return found.fetchone() is not None

    def _remember_deleted(self, response_id: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO deleted (id) VALUES (?)", (response_id,))
        # Numbers grow with time, so these are the latest.
        self._db.execute(
            "DELETE FROM deleted WHERE number <= (SELECT MAX(number) FROM deleted) - ?",
            (MAX_DELETED,),
        )

    def _push_out(self, now: float) -> None:
        self._db.execute("DELETE FROM responses WHERE expires <= ?", (now,))
        count, size = self.totals()
        while count > self._bounds.max_responses or size > self._bounds.max_bytes:
            number, least = self._db.execute(
                "SELECT number, size FROM responses ORDER BY number LIMIT 1"
            ).fetchone()
            self._db.execute("DELETE FROM responses WHERE number = ?", (number,))
            count, size = count - 1, size - least


class ResponseStore:
    """The table behind its thread."""

    def __init__(self, path: Path | None, bounds: StoreBounds) -> None:
        """Open or create; raises `sqlite3.Error` for a file that is none of ours."""
        self._table = ResponseTable(path, bounds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    async def put(self, response_id: str, tenant: str, stored: StoredResponse) -> bool:
        """Keep a response; false if it alone is too large, was deleted, or the file takes no more.

        Whoever waits for the answer gets it all the same.
        """
        try:
            return await self._do(lambda: self._table.put(response_id, tenant, stored, time.time()))
        except sqlite3.Error as error:
            _logger.warning("response not kept: %s", error, extra={"request_id": response_id})
            return False

    async def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        """A response of this tenant that is still there."""
        return await self._do(lambda: self._table.get(response_id, tenant, time.time()))

    async def delete(self, response_id: str, tenant: str) -> bool:
        """Forget a response; whether it was there."""
        return await self._do(lambda: self._table.delete(response_id, tenant, time.time()))

    def close(self) -> None:
        """End the thread, then close the file."""
        self._thread.submit(self._table.close)
        self._thread.shutdown(wait=True)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
