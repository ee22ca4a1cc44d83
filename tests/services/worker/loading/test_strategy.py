import os

import pytest

from services.worker.loading.strategy import LoadStrategy, ReadMode
from shared.errors import ConfigError

GIB = 1 << 30


def test_little_is_read_in_order_and_much_ahead() -> None:
    assert LoadStrategy().resolve(11 << 20, 8 * GIB).mode is ReadMode.LAZY
    assert LoadStrategy().resolve(GIB, 8 * GIB).mode is ReadMode.PREFETCH


@pytest.mark.parametrize("mode", [ReadMode.LAZY, ReadMode.PREFETCH, ReadMode.EAGER])
@pytest.mark.parametrize("total", [1, 100 * GIB])
def test_a_mode_that_was_asked_for_stays(mode: ReadMode, total: int) -> None:
    assert LoadStrategy(mode=mode).resolve(total, None).mode is mode


@pytest.mark.parametrize(
    ("free", "expected"), [(None, GIB // 4), (500 * GIB, GIB // 4), (GIB, GIB // 10), (-5, 1)]
)
def test_memory_is_256_mib_or_a_tenth_of_what_is_free(free: int | None, expected: int) -> None:
    assert LoadStrategy().resolve(GIB, free).memory_bytes == expected


def test_threads_are_two_per_core_up_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 2), (2, 4), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert LoadStrategy().resolve(GIB, None).num_threads == expected


def test_numbers_that_were_asked_for_stay() -> None:
    asked = LoadStrategy(num_threads=3, memory_bytes=5)
    resolved = asked.resolve(GIB, GIB)
    assert (resolved.num_threads, resolved.memory_bytes) == (3, 5)


@pytest.mark.parametrize("name", ["num_threads", "memory_bytes"])
def test_a_negative_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        LoadStrategy(**{name: -1})
