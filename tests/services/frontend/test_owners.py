"""Locks that end with their process."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

from services.frontend.owners import OwnerLocks


def hold(path: Path, pipe: Connection) -> None:
    """In a process of its own: hold a lock until killed."""
    locks = OwnerLocks(path)
    pipe.send(locks.claim(7))
    pipe.recv()


def test_a_killed_process_gives_its_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "owners"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(path, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(30)
        assert ours.recv() is True
        locks = OwnerLocks(path)
        assert locks.is_held_elsewhere(7)
        assert not locks.is_held_elsewhere(8)
        assert not locks.claim(7)
    finally:
        process.kill()
        process.join()
    assert not locks.is_held_elsewhere(7)
    assert locks.claim(7)
    locks.close()


def test_two_that_open_the_file_in_one_process_do_not_share_their_locks(tmp_path: Path) -> None:
    one, two = (OwnerLocks(tmp_path / "owners") for _ in range(2))
    assert one.claim(1)
    assert not two.claim(1)
    assert two.is_held_elsewhere(1)
    # Another open of the file that is closed gives nobody's lock back.
    OwnerLocks(tmp_path / "owners").close()
    assert two.is_held_elsewhere(1)
    assert two.claim(2)
    one.close()
    one.close()
    assert not two.is_held_elsewhere(1)
    two.close()


def test_the_file_is_for_nobody_else(tmp_path: Path) -> None:
    OwnerLocks(tmp_path / "owners").close()
    assert (tmp_path / "owners").stat().st_mode & 0o077 == 0
