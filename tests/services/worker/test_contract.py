import pytest

from services.worker.contract import ActiveRows, begin_step
from services.worker.plan import ContractError, StepPlan
from services.worker.rows import RUNNING, RowTable
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence


@pytest.fixture
def table() -> RowTable:
    """Row 0 has 6 prompt tokens, 4 of them computed in block 1; row 1 is new with 3."""
    table = RowTable(make_capacity())
    table.admit(make_sequence(0, [1, 2, 3, 4, 5, 6], computed=4))
    table.admit(make_sequence(1, [1, 2, 3]))
    table.block_table[0, 0], table.num_blocks[0] = 1, 1
    return table


def begin(table: RowTable, plan: StepPlan, window: int = 1) -> ActiveRows:
    return begin_step(plan, table, window, lambda new: table.admit(new) and None)


GOOD = {0: Entry(scheduled=2, computed=4, blocks=(2,)), 1: Entry(scheduled=3, blocks=(3,))}


def test_a_good_plan_tells_what_to_compute(table: RowTable) -> None:
    active = begin(table, make_plan(1, GOOD))
    assert active.rows.tolist() == [0, 1]
    assert active.num_tokens == 5
    assert active.is_sampling.tolist() == [True, True]
    assert table.block_table[0, :2].tolist() == [1, 2]


def test_a_chunk_that_is_not_the_last_does_not_sample(table: RowTable) -> None:
    active = begin(table, make_plan(1, GOOD | {1: Entry(scheduled=2, blocks=(3,))}))
    assert active.is_sampling.tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({0: Entry(scheduled=2, computed=3, blocks=(2,))}, "row 0 has another number"),
        ({0: Entry(scheduled=3, computed=4, blocks=(2,))}, "row 0 has fewer tokens"),
        ({0: Entry(scheduled=2, computed=4)}, "row 0 has too few blocks"),
        ({0: Entry(scheduled=0, computed=4, blocks=(2,))}, "row 0 has no token"),
        ({5: Entry(blocks=(4,))}, "row 5 was never described"),
        ({8: Entry()}, "row 8 is not below"),
        ({1: Entry(blocks=(0,))}, "block ids 0"),
        ({1: Entry(blocks=(64,))}, r"block ids 2\.\.64"),
        ({1: Entry(blocks=tuple(range(1, 12)))}, "row 1 gets more blocks"),
        ({1: Entry(scheduled=31, blocks=(3,))}, "33 tokens are more"),
    ],
)
def test_a_plan_that_does_not_fit_breaks_the_contract(
    table: RowTable, changes: dict, complaint: str
) -> None:
    with pytest.raises(ContractError, match=complaint):
        begin(table, make_plan(1, GOOD | changes))


def test_a_row_named_twice_breaks_the_contract(table: RowTable) -> None:
    plan = make_plan(1, GOOD)
    plan.rows[1] = 0
    with pytest.raises(ContractError, match="row 0 is named twice"):
        begin(table, plan)


def test_too_many_sequences_break_the_contract(table: RowTable) -> None:
    entries = {row: Entry() for row in range(5)}
    with pytest.raises(ContractError, match="max_num_seqs"):
        begin(table, make_plan(1, entries))


def test_blocks_that_no_row_claims_break_the_contract(table: RowTable) -> None:
    plan = make_plan(1, GOOD)
    plan.num_new_blocks[0] = 0
    with pytest.raises(ContractError, match="num_new_blocks"):
        begin(table, plan)


@pytest.mark.parametrize("row", [5, 8])
def test_freeing_a_row_that_is_not_in_use_breaks_the_contract(table: RowTable, row: int) -> None:
    with pytest.raises(ContractError, match=f"freed row {row}"):
        begin(table, make_plan(1, {}, freed=[row]))


def test_freeing_a_row_twice_breaks_the_contract(table: RowTable) -> None:
    with pytest.raises(ContractError, match="freed twice"):
        begin(table, make_plan(1, {}, freed=[1, 1]))


def test_two_new_sequences_for_one_row_break_the_contract(table: RowTable) -> None:
    twice = [make_sequence(3, [7]), make_sequence(3, [8])]
    with pytest.raises(ContractError, match="row 3 of a new sequence is in use"):
        begin(table, make_plan(1, {}, new=twice))


def test_a_row_may_be_described_named_and_freed_in_one_plan(table: RowTable) -> None:
    new = make_sequence(3, [7, 8])
    plan = make_plan(1, {3: Entry(scheduled=2, blocks=(9,))}, new=[new], freed=[3])
    assert begin(table, plan).rows.tolist() == [3]


def test_rows_that_ended_are_padding_and_unchecked(table: RowTable) -> None:
    table.state[0] += 1
    assert table.state[0] != RUNNING
    active = begin(table, make_plan(1, GOOD | {0: Entry(scheduled=9, computed=99)}))
    assert active.rows.tolist() == [1]
    assert active.entries.tolist() == [1]


def test_with_two_plans_in_flight_a_plan_may_lag_by_the_step_before_it(table: RowTable) -> None:
    table.num_computed[0], table.last_computed[0], table.last_step[0] = 5, 4, 6
    entry = Entry(scheduled=1, computed=4, blocks=(2,))
    with pytest.raises(ContractError, match="another number"):
        begin(table, make_plan(7, {0: entry}), window=1)
    with pytest.raises(ContractError, match="another number"):
        begin(table, make_plan(8, {0: Entry(scheduled=1, computed=4)}), window=2)
    assert begin(table, make_plan(7, {0: Entry(scheduled=1, computed=4)}), window=2).rows == [0]


@pytest.fixture
def drafting() -> RowTable:
    """Row 0 knows 6 tokens in block 1, 5 of them computed, and has two drafts."""
    table = RowTable(make_capacity(num_speculative_tokens=3))
    table.admit(make_sequence(0, [1, 2, 3, 4, 5, 6], computed=5))
    table.block_table[0, :2], table.num_blocks[0] = (1, 2), 2
    table.tokens[0, 6:8], table.num_drafts[0] = (7, 8), 2
    return table


@pytest.mark.parametrize(("scheduled", "drafts"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_a_plan_orders_at_most_the_drafts_that_there_are(
    drafting: RowTable, scheduled: int, drafts: int
) -> None:
    active = begin(drafting, make_plan(1, {0: Entry(scheduled=scheduled, computed=5)}))
    assert active.num_drafts is not None
    assert active.num_drafts.tolist() == [drafts]
    assert active.num_scheduled.tolist() == [1 + drafts]
    assert active.is_sampling.tolist() == [True]


def test_a_plan_may_not_order_more_drafts_than_a_row_can_have(drafting: RowTable) -> None:
    with pytest.raises(ContractError, match="row 0 has fewer tokens"):
        begin(drafting, make_plan(1, {0: Entry(scheduled=5, computed=5)}))


def test_a_chunk_before_the_known_end_has_no_drafts(drafting: RowTable) -> None:
    drafting.num_computed[0] = 2
    active = begin(drafting, make_plan(1, {0: Entry(scheduled=3, computed=2)}))
    assert active.num_drafts is not None
    assert active.num_drafts.tolist() == [0]
    assert active.is_sampling.tolist() == [False]


def test_drafts_stay_inside_the_blocks_and_known_tokens_must(drafting: RowTable) -> None:
    drafting.num_blocks[0] = 1
    with pytest.raises(ContractError, match="row 0 has too few blocks"):
        begin(drafting, make_plan(1, {0: Entry(scheduled=4, computed=5)}))
    drafting.num_tokens[0], drafting.num_computed[0] = 3, 2
    active = begin(drafting, make_plan(1, {0: Entry(scheduled=4, computed=2)}))
    assert active.num_scheduled.tolist() == [2]


@pytest.mark.parametrize(("computed", "is_right"), [(2, True), (3, True), (4, False), (5, True)])
def test_a_plan_made_ahead_counts_the_least_progress(
    drafting: RowTable, computed: int, is_right: bool
) -> None:
    """The step before started at 2, computed one known token and kept two drafts."""
    drafting.last_computed[0], drafting.num_accepted[0], drafting.last_step[0] = 2, 2, 6
    plan = make_plan(7, {0: Entry(scheduled=1, computed=computed)})
    if is_right:
        assert begin(drafting, plan, window=2).num_computed.tolist() == [5]
        return
    with pytest.raises(ContractError, match="another number"):
        begin(drafting, plan, window=2)
