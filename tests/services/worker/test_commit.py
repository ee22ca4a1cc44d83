import numpy as np

from services.worker.commit import commit_step
from services.worker.contract import begin_step
from services.worker.plan import FinishCode, StepPlan, StepResult
from services.worker.rows import ENDED, FREE, RUNNING, RowTable
from shared.errors import FailureReason, RequestError
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence


def new_table() -> RowTable:
    table = RowTable(make_capacity())
    for row in range(3):
        table.admit(make_sequence(row, [1, 2, 3], max_tokens=4, eos_token_ids=(9,)))
    return table


def commit(
    table: RowTable, plan: StepPlan, runs: list[list[int]], lengths: list[int]
) -> StepResult:
    active = begin_step(plan, table, 1, lambda new: None)
    return commit_step(plan, table, active, np.array(runs), np.array(lengths), None)


def test_new_tokens_go_into_the_rows_and_the_columns() -> None:
    table = new_table()
    scheduled = {0: 3, 1: 2, 2: 3}
    plan = make_plan(1, {r: Entry(scheduled=n, blocks=(1 + r,)) for r, n in scheduled.items()})
    result = commit(table, plan, [[7, 8], [0, 0], [5, 9]], [2, 0, 2])
    assert result.num_sampled_tokens.tolist() == [2, 0, 2]
    assert result.sampled_token_ids.tolist() == [7, 8, 5, 9]
    assert result.finish_codes.tolist() == [FinishCode.GOES_ON, FinishCode.GOES_ON, FinishCode.EOS]
    assert table.tokens[0, :5].tolist() == [1, 2, 3, 7, 8]
    assert table.num_computed[:3].tolist() == [3, 2, 3]
    assert table.num_tokens[:3].tolist() == [5, 3, 5]
    assert table.state[:3].tolist() == [RUNNING, RUNNING, ENDED]


def test_a_run_is_cut_at_its_end() -> None:
    table = new_table()
    plan = make_plan(1, {0: Entry(scheduled=3, blocks=(1,))})
    result = commit(table, plan, [[5, 9, 6]], [3])
    assert result.sampled_token_ids.tolist() == [5, 9]
    assert result.num_sampled_tokens.tolist() == [2]
    assert table.num_tokens[0] == 5


def test_freed_rows_are_free_after_the_step_and_not_before() -> None:
    table = new_table()
    plan = make_plan(1, {0: Entry(scheduled=3, blocks=(1,))}, freed=[0, 2])
    result = commit(table, plan, [[5]], [1])
    assert result.sampled_token_ids.tolist() == [5]
    assert table.state[:3].tolist() == [FREE, RUNNING, FREE]


def test_failures_of_rows_that_are_named_or_described_are_told() -> None:
    table = new_table()
    error = RequestError(FailureReason.NUMERICAL_ERROR, "not finite")
    table.fail(1, error)
    table.fail(2, error)
    described = make_sequence(3, [])
    table.admit(described)
    plan = make_plan(1, {1: Entry()})
    active = begin_step(plan, table, 1, lambda new: None)
    plan = make_plan(1, {1: Entry()}, new=[described])
    result = commit_step(plan, table, active, np.zeros((0, 1), int), np.zeros(0, int), None)
    assert [entry.row for entry in result.row_failures] == [1, 3]
    assert result.num_sampled_tokens.tolist() == [0]


def test_the_counts_of_the_plan_are_echoed() -> None:
    table = new_table()
    table.num_computed[0], table.last_computed[0], table.last_step[0] = 2, 1, 4
    plan = make_plan(5, {0: Entry(scheduled=1, computed=1, blocks=(1,))})
    active = begin_step(plan, table, 2, lambda new: None)
    result = commit_step(plan, table, active, np.array([[4]]), np.array([1]), None)
    assert result.num_computed_tokens.tolist() == [1]
    assert table.last_computed[0] == 2
    assert table.num_computed[0] == 3


def commit_drafts(max_tokens: int, run: list[int], accepted: int) -> tuple[StepResult, RowTable]:
    """Row 0 knows 3 tokens, 2 of them computed, and verifies three drafts."""
    table = RowTable(make_capacity(num_speculative_tokens=3))
    table.admit(make_sequence(0, [1, 2, 3], computed=2, max_tokens=max_tokens, eos_token_ids=(9,)))
    table.tokens[0, 3:6], table.num_drafts[0] = (5, 6, 7), 3
    plan = make_plan(1, {0: Entry(scheduled=4, computed=2, blocks=(1, 2))})
    active = begin_step(plan, table, 1, lambda new: None)
    runs, lengths = np.array([run]), np.array([len(run)])
    return commit_step(plan, table, active, runs, lengths, None, np.array([accepted])), table


def test_kept_drafts_are_computed_and_rejected_ones_are_not() -> None:
    result, table = commit_drafts(20, [5, 8], accepted=1)
    assert table.num_computed[0] == 4
    assert table.num_tokens[0] == 5
    assert table.tokens[0, :5].tolist() == [1, 2, 3, 5, 8]
    assert (table.num_drafts[0], table.num_accepted[0]) == (0, 1)
    assert result.num_drafted_tokens.tolist() == [3]
    assert result.num_accepted_tokens.tolist() == [1]


def test_a_run_cut_among_its_drafts_counts_those_that_are_left() -> None:
    result, table = commit_drafts(2, [5, 6, 7, 8], accepted=3)
    assert result.sampled_token_ids.tolist() == [5, 6]
    assert result.num_accepted_tokens.tolist() == [2]
    assert table.state[0] == ENDED
