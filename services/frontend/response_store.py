"""Finished responses, kept for a while: bounded in number, bytes and age.

One table of SQLite, in memory or in a file that several processes of the gateway share. Whatever is
over a bound pushes the oldest out. A response belongs to the key that made it: under any other it
does not exist. One that was deleted stays so, though its answer may still be under way, in any
process. All work is done by one thread, in order, off the event loop.

    open (its owner works on it) --> ended

Law: an end stands. Whoever cancels ends the row; the owner sees that and stops. A row whose owner
is gone is ended as failed by whoever notices.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from services.frontend.owners import OwnerLocks
from shared.log import get_logger

T = TypeVar("T")

_logger = get_logger(__name__)

_BUSY_S: Final = 5.0
_BUSY_PAUSE_S: Final = 0.005
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, tenant TEXT, expires REAL,
    size INTEGER, object BLOB, input BLOB, owner INTEGER
)"""
_OPEN_ONES: Final = (
    "CREATE INDEX IF NOT EXISTS open_ones ON responses (owner) WHERE owner IS NOT NULL"
)
# Numbers that were given out are remembered by SQLite, which is all that this table is for.
_OWNERS_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS owners (number INTEGER PRIMARY KEY AUTOINCREMENT)"
)
LOST_ERROR: Final = {
    "code": "server_error",
    "message": "The server process that worked on the response was lost; create it again.",
}
_DELETED_TABLE: Final = """
CREATE TABLE IF NOT EXISTS deleted (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE)"""
# Each id matters until the last word of its answer has come, which a deletion hurries.
MAX_DELETED: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The object as JSON, and the input items that led to it as a JSON list.

    `is_open` while a process works on it.
    """

    object_json: bytes
    input_json: bytes
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBounds:
    """What the store holds at most; each at least 1."""

    max_responses: int
    max_bytes: int
    ttl_s: float


def _write_ahead(db: sqlite3.Connection) -> None:
    """Switch the file to a write-ahead log, once others that do so at this moment allow it.

    SQLite refuses one of them at once, whatever the connection's timeout.

    Raises:
        sqlite3.OperationalError: It stayed locked.
    """
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_PAUSE_S)
        else:
            return


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
            try:
                _write_ahead(self._db)
            except sqlite3.OperationalError:
                self._db.close()
                raise
            # A crash of the machine may lose the last ones; a crash of the process does not.
            self._db.execute("PRAGMA synchronous=NORMAL")
        with self._db:
            # Several may open a new file at once.
            self._db.execute("BEGIN IMMEDIATE")
            for statement in (_TABLE, _DELETED_TABLE, _OWNERS_TABLE):
                self._db.execute(statement)
            self._add_owner_column()
            self._db.execute(_OPEN_ONES)
        self._locks = None if path is None else OwnerLocks(path.with_name(f"{path.name}-owners"))
        self._owner = self._claim()

    def put(self, response_id: str, tenant: str, stored: StoredResponse, now: float) -> bool:
        """Keep a response in place of its earlier state; an open one is this process's.

        Returns:
            False when it alone is too large, was deleted, or has ended already.
        """
        size = len(stored.object_json) + len(stored.input_json)
        if size > self._bounds.max_bytes:
            return False
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if self._is_deleted(response_id) or self._is_ended(response_id):
                return False
            self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            owner = self._owner if stored.is_open else None
            values = (response_id, tenant, now + self._bounds.ttl_s, size, owner)
            self._db.execute(
                "INSERT INTO responses (id, tenant, expires, size, owner, object, input)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*values, stored.object_json, stored.input_json),
            )
            self._push_out(now)
        return True

    def get(self, response_id: str, tenant: str, now: float) -> StoredResponse | None:
        """A response of this tenant that is still there; ended if its owner is gone."""
        row = self._find(response_id, tenant, now)
        if row is not None and row[2] is not None and not self._is_alive(row[2]):
            self.end_orphans()
            row = self._find(response_id, tenant, now)
        if row is None:
            return None
        return StoredResponse(object_json=row[0], input_json=row[1], is_open=row[2] is not None)

    def cancel(self, response_id: str, tenant: str, now: float) -> StoredResponse | None:
        """End a response as cancelled if somebody works on it; what it is by then."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            row = self._find(response_id, tenant, now)
            if row is not None and row[2] is not None and self._is_alive(row[2]):
                self._end(response_id, row[0], {"status": "cancelled"})
        return self.get(response_id, tenant, now)

    def ended_of(self, response_ids: Collection[str]) -> list[str]:
        """Those of the ids that somebody ended or deleted."""
        found = self._db.execute(
            "SELECT id FROM responses WHERE id IN (SELECT value FROM json_each(?1))"
            " AND owner IS NULL UNION ALL"
            " SELECT id FROM deleted WHERE id IN (SELECT value FROM json_each(?1))",
            (msgspec.json.encode(list(response_ids)).decode(),),
        )
        return [row[0] for row in found]

    def end_orphans(self) -> int:
        """End what belongs to processes that are gone as failed; how many those were."""
        owners = self._db.execute("SELECT DISTINCT owner FROM responses WHERE owner IS NOT NULL")
        lost = [owner for (owner,) in owners.fetchall() if not self._is_alive(owner)]
        num_ended = 0
        for owner in lost:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                rows = self._db.execute(
                    "SELECT id, object FROM responses WHERE owner = ?", (owner,)
                )
                for response_id, shown in rows.fetchall():
                    self._end(response_id, shown, {"status": "failed", "error": LOST_ERROR})
                    num_ended += 1
        return num_ended

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
        """Close the file; what is still open has no owner from now on."""
        self._db.close()
        if self._locks is not None:
            self._locks.close()

    def _add_owner_column(self) -> None:
        """Files of earlier versions do not have it; nobody works on what they hold."""
        names = [row[1] for row in self._db.execute("PRAGMA table_info(responses)")]
        if "owner" not in names:
            self._db.execute("ALTER TABLE responses ADD COLUMN owner INTEGER")
            self._db.execute(
                "UPDATE responses SET owner = 0"
                " WHERE json_extract(CAST(object AS TEXT), '$.status') = 'in_progress'"
            )

    def _claim(self) -> int:
        """A number of our own, and its lock."""
        while True:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                number = self._db.execute("INSERT INTO owners DEFAULT VALUES").lastrowid
                assert number is not None
                self._db.execute("DELETE FROM owners")
            # Taken where the table was made anew while others had the old one open.
            if self._locks is None or self._locks.claim(number):
                return number

    def _is_alive(self, owner: int) -> bool:
        if owner == self._owner:
            return True
        return self._locks is not None and self._locks.is_held_elsewhere(owner)

    def _find(self, response_id: str, tenant: str, now: float) -> Any:  # noqa: ANN401  # a row
        return self._db.execute(
            "SELECT object, input, owner FROM responses"
            " WHERE id = ? AND tenant = ? AND expires > ?",
            (response_id, tenant, now),
        ).fetchone()

    def _end(self, response_id: str, object_json: bytes, change: Mapping[str, Any]) -> None:
        ended = msgspec.json.encode({**msgspec.json.decode(object_json), **change})
        self._db.execute(
            "UPDATE responses SET object = ?, size = size + ?, owner = NULL WHERE id = ?",
            (ended, len(ended) - len(object_json), response_id),
        )

    def _is_ended(self, response_id: str) -> bool:
        found = self._db.execute(
            "SELECT 1 FROM responses WHERE id = ? AND owner IS NULL", (response_id,)
        )
        return found.fetchone() is not None

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
        """Keep a response; false if it is too large, deleted or ended, or the file takes no more.

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

    async def cancel(self, response_id: str, tenant: str) -> StoredResponse | None:
        """End a response as cancelled if somebody works on it; what it is by then."""
        return await self._do(lambda: self._table.cancel(response_id, tenant, time.time()))

    async def look(self, response_ids: Collection[str]) -> list[str]:
        """Those of the ids that somebody ended or deleted; ends what lost processes left as well.

        A file that cannot be read now is looked at again.
        """
        try:
            num_lost = await self._do(self._table.end_orphans)
            if num_lost:
                _logger.warning("responses of a lost process failed", extra={"num": num_lost})
            if not response_ids:
                return []
            return await self._do(lambda: self._table.ended_of(response_ids))
        except sqlite3.Error as error:
            _logger.warning("responses not looked at: %s", error)
            return []

    async def delete(self, response_id: str, tenant: str) -> bool:
        """Forget a response; whether it was there."""
        return await self._do(lambda: self._table.delete(response_id, tenant, time.time()))

    def close(self) -> None:
        """End the thread, then close the file."""
        self._thread.submit(self._table.close)
        self._thread.shutdown(wait=True)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
