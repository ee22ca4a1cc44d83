"""Rows 0, 1, 2 know three tokens each and have 3, 0 and 1 drafts: N = 4 + 1 + 2 logits."""

import numpy as np
import pytest

from services.worker.contract import ActiveRows
from services.worker.drafting.verification import Runs, Verification
from services.worker.rows import RowTable
from tests.services.worker.plans import make_capacity, make_sequence

DRAFTS = {0: [11, 12, 13], 1: [], 2: [14]}


@pytest.fixture
def verification() -> Verification:
    table = RowTable(make_capacity(num_speculative_tokens=3))
    for row, drafts in DRAFTS.items():
        table.admit(make_sequence(row, [1, 2], outputs=[3], computed=2))
        table.tokens[row, 3 : 3 + len(drafts)] = drafts
    counts = np.array([len(drafts) for drafts in DRAFTS.values()])
    active = ActiveRows(
        entries=np.arange(3),
        rows=np.arange(3),
        num_scheduled=counts + 1,
        num_computed=np.full(3, 2),
        is_sampling=np.ones(3, np.bool_),
        num_drafts=counts,
    )
    return Verification(table, active, np.arange(3))


def judge(verification: Verification, targets: list[int], broken: tuple[int, ...] = ()) -> Runs:
    is_finite = np.ones(len(targets), np.bool_)
    is_finite[list(broken)] = False
    return verification.judge(np.array(targets), is_finite)


def test_logits_belong_to_rows_in_order(verification: Verification) -> None:
    assert verification.rows_of_logits.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert verification.offsets.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert verification.num_outputs.tolist() == [1, 2, 3, 4, 1, 1, 2]
    before = [verification.drafts_before(place).tolist() for place in range(7)]
    assert before == [[], [11], [11, 12], [11, 12, 13], [], [], [14]]


@pytest.mark.parametrize(
    ("targets", "accepted"),
    [
        ([11, 12, 13, 50, 60, 14, 70], [3, 0, 1]),
        ([11, 12, 40, 50, 60, 14, 70], [2, 0, 1]),
        ([40, 12, 13, 50, 60, 41, 14], [0, 0, 0]),
        ([11, 40, 13, 50, 11, 14, 14], [1, 0, 1]),
    ],
)
def test_the_longest_prefix_of_drafts_is_kept_and_the_target_behind_it(
    verification: Verification, targets: list[int], accepted: list[int]
) -> None:
    runs = judge(verification, targets)
    assert runs.accepted.tolist() == accepted
    assert runs.lengths.tolist() == [count + 1 for count in accepted]
    assert runs.tokens[0].tolist() == targets[:4]
    assert runs.tokens[1, 0] == targets[4]
    assert runs.tokens[2, :2].tolist() == targets[5:]


def test_an_old_token_behind_the_drafts_is_no_draft(verification: Verification) -> None:
    verification._table.tokens[1, 3] = 60
    assert judge(verification, [11, 40, 0, 0, 60, 40, 0]).accepted.tolist() == [1, 0, 0]


def test_broken_numbers_count_as_far_as_the_run_goes(verification: Verification) -> None:
    targets = [11, 40, 13, 50, 60, 14, 70]
    assert judge(verification, targets, (2, 3)).is_broken.tolist() == [False, False, False]
    runs = judge(verification, targets, (1, 6))
    assert runs.is_broken.tolist() == [True, False, True]
    assert runs.lengths.tolist() == [0, 1, 0]


def test_logprobs_are_measured_where_tokens_were_kept(verification: Verification) -> None:
    kept, asked = np.array([2, 1, 2]), np.array([0, -1, 5])
    assert verification.kept_places(kept, asked).tolist() == [0, 1, 5, 6]
