"""Counts by position: the draft at a place was kept in as many steps as kept that many or more."""

import pytest

from services.scheduler.draft_counts import MIN_DRAFTS, DraftCounts, DraftWatch, add_positions
from shared.sampling import LoadSnapshot


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


def look(num_drafts: int, *kept: int) -> LoadSnapshot:
    return LoadSnapshot(num_drafts_total=num_drafts, num_accepted_tokens_per_position=kept)


def test_drafts_that_are_never_right_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = DraftWatch()
    watch.look(look(MIN_DRAFTS - 1, 0))
    assert not caplog.records
    watch.look(look(MIN_DRAFTS, 3, 1))
    watch.look(look(2 * MIN_DRAFTS, 3, 1))
    assert [record.message for record in caplog.records] == [
        "drafts are hardly ever right: is the MTP layer that of this model?"
    ]


def test_drafts_that_are_right_now_and_then_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    DraftWatch().look(look(MIN_DRAFTS, 300, 2))
    DraftWatch().look(look(0))
    assert not caplog.records
