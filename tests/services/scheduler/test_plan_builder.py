"""Columns of a plan grow together."""

from services.scheduler.plan_builder import PlanBuilder
from tests.services.scheduler.builders import sequence


def test_decoding_rows_order_one_token_and_their_drafts() -> None:
    found = sequence()
    found.row, found.num_planned_tokens = 3, 7
    plan = PlanBuilder(9, [found], 4).build([2])
    assert (plan.step, plan.rows, plan.freed_rows) == (9, [3], [2])
    assert (plan.num_computed_tokens, plan.num_scheduled_tokens) == ([7], [4])
    assert (found.num_planned_tokens, found.num_steps, found.last_step) == (8, 1, 9)


def test_a_further_row_brings_the_blocks_that_the_worker_does_not_know() -> None:
    first, second = sequence(), sequence()
    first.row, second.row = 0, 1
    second.blocks, second.num_sent_blocks = [5, 6, 7], 1
    builder = PlanBuilder(1, [first], 1)
    builder.add(second, 5, num_drafts=2)
    plan = builder.build([])
    assert plan.num_new_blocks == [0, 2]
    assert list(plan.new_blocks) == [6, 7]
    assert plan.num_scheduled_tokens == [1, 7]
    assert (second.num_planned_tokens, second.num_sent_blocks) == (5, 3)
