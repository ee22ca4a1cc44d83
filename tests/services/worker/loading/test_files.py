import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.worker.loading.files import FileCursor, WeightFile, open_regular
from shared.errors import CheckpointError


@pytest.fixture
def cursor() -> Iterator[FileCursor]:
    with FileCursor() as one:
        yield one


def seen(path: Path) -> WeightFile:
    descriptor, file = open_regular(path)
    os.close(descriptor)
    return file


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_bytes_come_from_their_place_and_are_counted(tmp_path: Path, cursor: FileCursor) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(bytes(range(100, 200)))
    a, b = seen(tmp_path / "a"), seen(tmp_path / "b")
    target = np.empty(10, np.uint8)
    for file, offset, expected in ((a, 5, 5), (b, 0, 100), (a, 90, 90)):
        cursor.read(file, offset, target)
        assert target.tolist() == list(range(expected, expected + 10))
    assert cursor.num_bytes_read == 30


def test_one_file_is_open_at_a_time_and_none_after_the_end(tmp_path: Path) -> None:
    before = num_open()
    files = []
    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
        files.append(seen(tmp_path / name))
    with FileCursor() as cursor:
        for file in files:
            cursor.read(file, 0, np.empty(1, np.uint8))
            assert num_open() == before + 1
    assert num_open() == before


def test_a_file_cut_short_while_it_is_open_is_told(tmp_path: Path, cursor: FileCursor) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    file = seen(path)
    cursor.read(file, 0, np.empty(10, np.uint8))
    os.truncate(path, 50)
    with pytest.raises(CheckpointError, match="/a: is truncated: ends at byte 50"):
        cursor.read(file, 40, np.empty(20, np.uint8))


@pytest.mark.parametrize("change", ["longer", "replaced", "touched"])
def test_a_file_changed_since_its_header_was_read_is_told(
    tmp_path: Path, cursor: FileCursor, change: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    file = seen(path)
    if change == "longer":
        path.write_bytes(bytes(101))
    elif change == "replaced":
        (tmp_path / "new").write_bytes(bytes(100))
        os.utime(tmp_path / "new", ns=(file.modified_ns, file.modified_ns))
        (tmp_path / "new").rename(path)
    else:
        os.utime(path, ns=(0, 0))
    with pytest.raises(CheckpointError, match="/a: was changed while it was being read"):
        cursor.read(file, 0, np.empty(1, np.uint8))


def test_a_failing_disk_is_told_with_its_reason(
    tmp_path: Path, cursor: FileCursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    file = seen(path)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="/a: cannot be read: Input/output error"):
        cursor.read(file, 0, np.empty(1, np.uint8))
    with pytest.raises(CheckpointError, match="/a: norm: cannot be read: Input/output error"):
        cursor.read(file, 0, np.empty(1, np.uint8), "norm")


def test_short_reads_are_continued(
    tmp_path: Path, cursor: FileCursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    file, whole = seen(path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:7]], at))
    target = np.empty(50, np.uint8)
    cursor.read(file, 20, target)
    assert target.tolist() == list(range(20, 70))


def test_a_file_that_may_not_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="/a: cannot be opened: Permission denied"):
        open_regular(tmp_path / "a")
