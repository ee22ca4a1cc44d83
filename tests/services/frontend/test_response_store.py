"""What is kept, for whom, how long and how much."""

import asyncio
import json
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.frontend import response_store
from services.frontend.response_store import (
    LOST_ERROR,
    ResponseStore,
    ResponseTable,
    StoreBounds,
    StoredResponse,
)

BOUNDS = StoreBounds(max_responses=3, max_bytes=100, ttl_s=10)


def stored(size: int = 2, *, is_open: bool = False) -> StoredResponse:
    return StoredResponse(object_json=b"o" * (size - 1), input_json=b"i", is_open=is_open)


def work(status: str = "in_progress") -> StoredResponse:
    """A response as its owner keeps it, open until its status is another."""
    shown = json.dumps({"status": status, "error": None}).encode()
    return StoredResponse(object_json=shown, input_json=b"i", is_open=status == "in_progress")


def shown_of(found: StoredResponse | None) -> dict[str, Any]:
    assert found is not None
    shown: dict[str, Any] = json.loads(found.object_json)
    return shown


def opened(path: Path) -> ResponseTable:
    return ResponseTable(path, StoreBounds(max_responses=9, max_bytes=10_000, ttl_s=10))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def table() -> ResponseTable:
    return ResponseTable(None, BOUNDS)


def test_what_was_put_is_there_for_its_tenant_alone(table: ResponseTable) -> None:
    assert table.put("r1", "ann", stored(), 0)
    assert table.get("r1", "ann", 1) == stored()
    assert table.get("r1", "bob", 1) is None
    assert not table.delete("r1", "bob", 1)
    assert table.delete("r1", "ann", 1)
    assert table.get("r1", "ann", 1) is None
    assert not table.delete("r1", "ann", 1)


def test_what_was_deleted_does_not_come_back(table: ResponseTable) -> None:
    table.put("r1", "ann", stored(is_open=True), 0)
    table.delete("r1", "bob", 1)
    assert table.put("r1", "ann", stored(), 1), "bob has deleted nothing"
    assert table.delete("r1", "ann", 1)
    assert not table.put("r1", "ann", stored(), 2)
    assert table.get("r1", "ann", 2) is None
    assert table.totals() == (0, 0)


def test_ids_of_the_deleted_are_bounded_in_number(
    table: ResponseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "MAX_DELETED", 3)
    for number in range(5):
        table.put(f"r{number}", "", stored(), 0)
        table.delete(f"r{number}", "", 0)
    assert [number for number in range(5) if table.put(f"r{number}", "", stored(), 1)] == [0, 1]


def test_what_another_process_deleted_does_not_come_back(tmp_path: Path) -> None:
    first, second = (ResponseTable(tmp_path / "responses.db", BOUNDS) for _ in range(2))
    first.put("r1", "", stored(), 0)
    assert second.delete("r1", "", 1)
    assert not first.put("r1", "", stored(), 2)
    assert first.get("r1", "", 2) is None
    first.close()
    second.close()


def test_a_later_state_replaces_an_earlier_one(table: ResponseTable) -> None:
    table.put("r1", "", stored(2, is_open=True), 0)
    assert table.put("r1", "", stored(7), 1)
    assert table.get("r1", "", 1) == stored(7)
    assert table.totals() == (1, 7)


@pytest.mark.parametrize("end", ["completed", "cancelled", "failed", "incomplete"])
@pytest.mark.parametrize("late", ["completed", "cancelled", "failed", "in_progress"])
def test_an_end_stands(end: str, late: str) -> None:
    table = ResponseTable(None, BOUNDS)
    table.put("r1", "", work(), 0)
    table.put("r1", "", work(end), 0)
    assert not table.put("r1", "", work(late), 1)
    assert shown_of(table.cancel("r1", "", 1))["status"] == end
    assert shown_of(table.get("r1", "", 1))["status"] == end


def test_what_is_cancelled_stays_so_whatever_its_owner_says_later(path: Path) -> None:
    owner, other = opened(path), opened(path)
    owner.put("r1", "ann", work(), 0)
    owner.put("r2", "ann", work(), 0)
    assert other.cancel("r1", "bob", 1) is None
    assert other.cancel("r0", "ann", 1) is None
    assert owner.ended_of(["r1", "r2"]) == []
    cancelled = other.cancel("r1", "ann", 1)
    assert (cancelled and cancelled.is_open, shown_of(cancelled)["status"]) == (False, "cancelled")
    other.delete("r2", "ann", 1)
    assert owner.ended_of(["r0", "r1", "r2"]) == ["r1", "r2"]
    assert not owner.put("r1", "ann", work("completed"), 2)
    assert shown_of(owner.get("r1", "ann", 2))["status"] == "cancelled"
    owner.close()
    other.close()


@pytest.mark.parametrize("by", ["get", "sweep", "cancel"])
def test_what_a_lost_process_worked_on_has_failed(path: Path, by: str) -> None:
    lost, other = opened(path), opened(path)
    lost.put("r1", "", work(), 0)
    lost.put("r2", "", work("completed"), 0)
    assert other.end_orphans() == 0
    assert shown_of(other.get("r1", "", 1))["status"] == "in_progress", "its owner lives"
    before = other.totals()[1]
    lost.close()  # which the kernel does for one that is killed
    if by == "cancel":
        assert shown_of(other.cancel("r1", "", 1))["status"] == "failed"
    elif by == "sweep":
        assert other.end_orphans() == 1
    found = other.get("r1", "", 1)
    shown = shown_of(found)
    assert (shown["status"], shown["error"]) == ("failed", LOST_ERROR)
    assert not (found and found.is_open)
    assert shown_of(other.get("r2", "", 1))["status"] == "completed"
    assert found is not None
    assert other.totals()[1] - before == len(found.object_json) - len(work().object_json)
    assert other.end_orphans() == 0
    other.close()


def test_who_starts_after_a_lost_process_is_not_taken_for_it(path: Path) -> None:
    lost = opened(path)
    lost.put("r1", "", work(), 0)
    lost.close()
    later = opened(path)
    later.put("r2", "", work(), 0)
    assert shown_of(later.get("r1", "", 1))["status"] == "failed"
    assert shown_of(later.get("r2", "", 1))["status"] == "in_progress"
    later.close()


def test_a_file_of_before_there_were_owners_is_read_on(path: Path) -> None:
    old = sqlite3.connect(path)
    old.execute(
        "CREATE TABLE responses (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE,"
        " tenant TEXT, expires REAL, size INTEGER, object BLOB, input BLOB)"
    )
    for status in ("in_progress", "completed"):
        values = (status, work(status).object_json)
        old.execute("INSERT INTO responses VALUES (NULL, ?, '', 10, 50, ?, X'69')", values)
    old.commit()
    old.close()
    table = opened(path)
    assert shown_of(table.get("in_progress", "", 1))["status"] == "failed"
    assert shown_of(table.get("completed", "", 1))["status"] == "completed"
    table.close()


def test_what_is_too_old_is_gone(table: ResponseTable) -> None:
    table.put("r1", "", stored(), 0)
    assert table.get("r1", "", 9.9)
    assert table.get("r1", "", 10) is None
    assert not table.delete("r1", "", 10)
    table.put("r2", "", stored(), 11)
    assert table.totals() == (1, 2)


def test_the_oldest_go_when_there_are_too_many(table: ResponseTable) -> None:
    for number in range(5):
        table.put(f"r{number}", "", stored(), number)
    assert [number for number in range(5) if table.get(f"r{number}", "", 5)] == [2, 3, 4]


def test_the_oldest_go_when_they_are_too_large(table: ResponseTable) -> None:
    table.put("r0", "", stored(60), 0)
    table.put("r1", "", stored(30), 0)
    table.put("r2", "", stored(70), 0)
    assert table.totals() == (2, 100)
    assert table.get("r0", "", 1) is None


def test_one_that_never_fits_pushes_nothing_out(table: ResponseTable) -> None:
    table.put("r0", "", stored(60), 0)
    assert not table.put("r1", "", stored(101), 0)
    assert table.get("r0", "", 1)


def test_a_file_is_shared_and_private(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    one, other = ResponseTable(path, BOUNDS), ResponseTable(path, BOUNDS)
    one.put("r1", "", stored(), 0)
    assert other.get("r1", "", 1) == stored()
    assert path.stat().st_mode & 0o077 == 0
    one.close()
    other.close()


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"not a database, by any means" * 100)
    with pytest.raises(sqlite3.Error):
        ResponseTable(path, BOUNDS)


async def test_the_store_works_behind_a_thread_and_ends() -> None:
    store = ResponseStore(None, BOUNDS)
    assert await store.put("r1", "", stored())
    assert await store.get("r1", "") == stored()
    assert await store.delete("r1", "")
    store.close()


async def test_a_file_that_takes_no_more_costs_nobody_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, BOUNDS)
    other = sqlite3.connect(path)
    other.execute("DROP TABLE responses")
    other.close()
    assert not await store.put("r1", "", stored())
    store.close()


async def test_a_look_ends_orphans_and_names_what_was_ended(path: Path) -> None:
    lost, store = opened(path), ResponseStore(path, BOUNDS)
    lost.put("r1", "", work(), 1e12)
    await store.put("r2", "", work())
    assert await store.look(["r2"]) == []
    await store.cancel("r2", "")
    lost.close()
    assert await store.look(["r2"]) == ["r2"]
    assert shown_of(await store.get("r1", ""))["status"] == "failed"
    store.close()


async def test_a_file_that_cannot_be_looked_at_ends_nothing(path: Path) -> None:
    store = ResponseStore(path, BOUNDS)
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE responses")
    assert await store.look(["r1"]) == []
    store.close()


async def test_several_open_a_new_file_at_once(path: Path) -> None:
    stores = await asyncio.gather(
        *(asyncio.to_thread(ResponseStore, path, BOUNDS) for _ in range(8))
    )
    for number, store in enumerate(stores):
        assert await store.put(f"r{number}", "", work())
    for store in stores:
        store.close()


class Contended(sqlite3.Connection):
    """What two that switch a new file at the same moment see, as often as asked.

    SQLite answers one of them at once then, whatever its timeout.
    """

    num_left = 0

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if "journal_mode" in statement and Contended.num_left:
            Contended.num_left -= 1
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
            raise error
        return super().execute(statement, *values)


@pytest.fixture
def contended(monkeypatch: pytest.MonkeyPatch) -> type[Contended]:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Contended))
    return Contended


async def test_others_that_open_a_new_file_at_the_moment_are_waited_for(
    path: Path, contended: type[Contended]
) -> None:
    contended.num_left = 3
    store = ResponseStore(path, BOUNDS)
    assert contended.num_left == 0
    assert await store.put("r1", "", work())
    store.close()


def test_a_file_that_stays_locked_is_an_error(
    path: Path, contended: type[Contended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_BUSY_S", 0.05)
    contended.num_left = 10**6
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        ResponseStore(path, BOUNDS)
