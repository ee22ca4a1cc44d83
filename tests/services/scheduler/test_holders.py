import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.holders import Holders

NAMES = [bytes([n]) for n in range(6)]


def held(*replicas: str) -> Holders:
    """Each replica holds the blocks whose numbers its text names."""
    holders = Holders()
    for number, text in enumerate(replicas):
        for name in text:
            holders.stored(number, NAMES[int(name)])
    return holders


@pytest.mark.parametrize(
    ("replicas", "hits"),
    [
        (("", ""), [0, 0]),
        (("012", "0"), [3, 1]),
        (("012345", "012345"), [6, 6]),
        # What is behind a gap is of no use.
        (("02345", "12345"), [1, 0]),
        (("01", "0123"), [2, 4]),
    ],
)
def test_hits_are_the_blocks_of_the_start_that_a_replica_holds(
    replicas: tuple[str, ...], hits: list[int]
) -> None:
    assert held(*replicas).num_hits(NAMES, 2) == hits


def test_names_are_read_no_further_than_somebody_holds_them() -> None:
    read = []
    names = (read.append(name) or name for name in NAMES)
    assert held("01").num_hits(names, 1) == [2]
    assert read == NAMES[:3]


_CHANGES = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "clear"]), st.integers(0, 2), st.integers(0, 5)),
    max_size=40,
)


@given(changes=_CHANGES)
def test_whatever_changes_hits_are_those_of_a_picture_kept_by_hand(
    changes: list[tuple[str, int, int]],
) -> None:
    holders, caches = Holders(), [set[int](), set[int](), set[int]()]
    for change, replica, block in changes:
        if change == "store":
            holders.stored(replica, NAMES[block])
            caches[replica].add(block)
        elif change == "remove":
            holders.removed(replica, NAMES[block])
            caches[replica].discard(block)
        else:
            holders.cleared(replica)
            caches[replica].clear()
    expected = [next((n for n in range(6) if n not in cache), 6) for cache in caches]
    assert holders.num_hits(NAMES, 3) == expected
    assert len(holders) == len(set().union(*caches)), "a name that nobody holds is kept"
