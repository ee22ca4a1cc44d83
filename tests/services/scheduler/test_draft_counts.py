"""Counts by position: the draft at a place was kept in as many steps as kept that many or more."""

from services.scheduler.draft_counts import DraftCounts, add_positions


def test_drafts_are_counted_by_their_place() -> None:
    counts = DraftCounts(3)
    counts.add([3, 3, 0, 2, 3], [3, 1, 0, 0, 2])
    assert counts.num_drafts == 4
    assert counts.num_drafted_tokens == 11
    assert counts.per_position == (3, 2, 1)
    counts.add([1], [1])
    assert counts.per_position == (4, 2, 1)


def test_nothing_drafted_counts_nothing() -> None:
    counts = DraftCounts(2)
    counts.add([], [])
    counts.add([0], [0])
    assert (counts.num_drafts, counts.num_drafted_tokens, counts.per_position) == (0, 0, (0, 0))


def test_epochs_with_different_numbers_of_drafts_add_up() -> None:
    assert add_positions((5, 3), (1, 1, 1)) == (6, 4, 1)
    assert add_positions((), (2,)) == (2,)
