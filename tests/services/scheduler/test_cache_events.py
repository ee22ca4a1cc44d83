"""Readers of the log have the picture that the cache has, whatever they missed."""

import random

import pytest

from services.scheduler.cache_events import CacheChange, CachedBlock, CacheEvent, CacheLog
from services.scheduler.holders import Holders

NAMES = [bytes([n]) * 32 for n in range(8)]


class Caches:
    """What two caches hold, and their log."""

    def __init__(self, num_kept: int = 16) -> None:
        self.held: set[tuple[int, bytes]] = set()
        self.log = CacheLog(self.blocks, num_kept)

    def blocks(self) -> list[CachedBlock]:
        return [
            CachedBlock(replica=replica, block=1, block_hash=name, parent_hash=b"")
            for replica, name in self.held
        ]

    def change(self, dice: random.Random) -> None:
        replica, name = dice.randrange(2), dice.choice(NAMES)
        if dice.random() < 0.05:
            self.held = {entry for entry in self.held if entry[0] != replica}
            self.log.cleared(replica)
        elif (replica, name) in self.held:
            self.held.remove((replica, name))
            self.log.removed(replica, name)
        else:
            self.held.add((replica, name))
            self.log.stored(replica, name, b"")


class Reader:
    """Keeps a picture by what the log says."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.held: set[tuple[int, bytes]] = set()
        self.num_snapshots = 0

    def read(self, log: CacheLog) -> None:
        update = log.read(self.number)
        if update.snapshot is not None:
            self.num_snapshots += 1
            self.held = {(block.replica, block.block_hash) for block in update.snapshot}
        for expected, event in enumerate(update.events, (self.number or 0) + 1):
            assert event.number == expected
            self.apply(event)
        self.number = update.number

    def apply(self, event: CacheEvent) -> None:
        if event.change is CacheChange.STORED:
            self.held.add((event.replica, event.block_hash))
        elif event.change is CacheChange.REMOVED:
            self.held.remove((event.replica, event.block_hash))
        else:
            self.held = {entry for entry in self.held if entry[0] != event.replica}


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_that_comes_and_goes_sees_what_is_cached(seed: int) -> None:
    dice, caches, reader = random.Random(seed), Caches(), Reader()
    for _ in range(60):
        for _ in range(dice.choice([0, 1, 5, 40])):
            caches.change(dice)
        reader.read(caches.log)
        assert reader.held == caches.held
    # Gaps beyond what is kept were bridged, the others needed no snapshot.
    assert 1 < reader.num_snapshots < 40


def test_whoever_knows_all_is_told_nothing() -> None:
    caches = Caches()
    caches.log.stored(0, NAMES[0], b"p")
    update = caches.log.read(1)
    assert (update.number, update.events, update.snapshot) == (1, [], None)


def test_a_change_is_told_as_it_was() -> None:
    caches = Caches()
    caches.log.stored(1, NAMES[0], b"p")
    caches.log.removed(1, NAMES[0])
    caches.log.cleared(0)
    assert caches.log.read(0).events == [
        CacheEvent(
            number=1,
            replica=1,
            change=CacheChange.STORED,
            block_hash=NAMES[0],
            parent_hash=b"p",
        ),
        CacheEvent(number=2, replica=1, change=CacheChange.REMOVED, block_hash=NAMES[0]),
        CacheEvent(number=3, replica=0, change=CacheChange.CLEARED),
    ]


@pytest.mark.parametrize("after", [None, 5, 1_000_000])
def test_a_newcomer_and_one_from_another_scheduler_get_a_snapshot(after: int | None) -> None:
    caches = Caches()
    caches.log.stored(0, NAMES[0], b"")
    assert caches.log.read(after).snapshot is not None


def test_who_holds_what_follows_every_change() -> None:
    holders = Holders()
    log = CacheLog(list, holders=holders)
    for replica in (0, 1):
        log.stored(replica, b"a", b"")
        log.stored(replica, b"b", b"a")
    log.removed(1, b"b")
    assert holders.num_hits([b"a", b"b"], 2) == [2, 1]
    log.cleared(0)
    assert holders.num_hits([b"a", b"b"], 2) == [0, 1]
