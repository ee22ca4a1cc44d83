"""What is kept, for whom, how long and how much."""

import sqlite3
from pathlib import Path

import pytest

from services.frontend import response_store
from services.frontend.response_store import (
    ResponseStore,
    ResponseTable,
    StoreBounds,
    StoredResponse,
)

BOUNDS = StoreBounds(max_responses=3, max_bytes=100, ttl_s=10)


def stored(size: int = 2) -> StoredResponse:
    return StoredResponse(object_json=b"o" * (size - 1), input_json=b"i")


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
    table.put("r1", "ann", stored(), 0)
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
    table.put("r1", "", stored(2), 0)
    table.put("r1", "", stored(7), 1)
    assert table.get("r1", "", 1) == stored(7)
    assert table.totals() == (1, 7)


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
