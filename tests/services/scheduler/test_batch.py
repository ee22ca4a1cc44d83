"""Which tokens a step orders, who is admitted, who gives way."""

import pytest

from services.scheduler.outlet import Outlet
from services.scheduler.plan import StepPlan, WorkerContractError
from services.scheduler.sequence import SequenceState
from shared.endings import FinishReason
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.harness import Harness


def scheduled(plan: StepPlan | None) -> list[tuple[int, int]]:
    """(position, count) of every row."""
    assert plan is not None
    return list(zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True))


def test_a_long_prompt_is_cut_into_chunks_by_the_budget() -> None:
    harness = Harness(capacity(max_num_batched_tokens=10))
    harness.submit(Outlet(), [23], max_tokens=2)
    steps = []
    for _ in range(4):
        steps.append(scheduled(harness.plan()))
        harness.take_result()
    assert steps == [[(0, 10)], [(10, 10)], [(20, 3)], [(23, 1)]]


def test_all_blocks_of_a_prompt_come_with_its_first_chunk() -> None:
    harness = Harness(capacity(max_num_batched_tokens=10))
    harness.submit(Outlet(), [23])
    harness.step()
    harness.step()
    assert [plan.num_new_blocks for plan in harness.plans] == [[6], [0]]


def test_the_last_admitted_prompt_takes_what_the_budget_leaves() -> None:
    harness = Harness(capacity(max_num_batched_tokens=24, num_blocks=40))
    harness.submit(Outlet(), [15, 15, 15])
    assert scheduled(harness.plan()) == [(0, 15), (0, 9)]
    harness.take_result()
    assert scheduled(harness.plan()) == [(15, 1), (9, 6), (0, 15)]


def test_decoding_rows_are_served_before_a_long_prompt() -> None:
    harness = Harness(capacity(max_num_batched_tokens=8, num_blocks=40))
    outlet = Outlet()
    harness.submit(outlet, [4, 4], max_tokens=20)
    harness.step()
    harness.submit(outlet, [40])
    for _ in range(4):
        plan = harness.plan()
        assert [count for _, count in scheduled(plan)] == [1, 1, 6]
        harness.take_result()


def test_max_num_seqs_bounds_the_rows_of_a_plan() -> None:
    harness = Harness(capacity(max_num_seqs=3, num_blocks=100))
    harness.submit(Outlet(), [2] * 5)
    plan = harness.plan()
    assert plan is not None
    assert len(plan.rows) == 3
    load = harness.core.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (3, 2, 4)


def test_a_decode_step_names_a_block_only_when_one_is_needed() -> None:
    harness = Harness(capacity(block_size_tokens=4))
    harness.submit(Outlet(), [3], max_tokens=9)
    harness.run_to_end()
    assert [plan.num_new_blocks for plan in harness.plans] == [
        [1], [0], [1], [0], [0], [0], [1], [0], [0],
    ]  # fmt: skip


def test_the_second_plan_in_flight_orders_the_token_that_only_the_worker_knows() -> None:
    harness = Harness(capacity(), max_plans_in_flight=2)
    harness.submit(Outlet(), [5], max_tokens=8)
    assert scheduled(harness.plan()) == [(0, 5)]
    assert scheduled(harness.plan()) == [(5, 1)]
    assert harness.plan() is None
    harness.take_result()
    assert scheduled(harness.plan()) == [(6, 1)]


def test_a_row_that_the_plans_in_flight_surely_end_is_not_planned_again() -> None:
    harness = Harness(capacity(), max_plans_in_flight=2)
    harness.submit(Outlet(), [5], max_tokens=2)
    assert scheduled(harness.plan()) == [(0, 5)]
    assert scheduled(harness.plan()) == [(5, 1)]
    harness.take_result()
    assert harness.plan() is None
    harness.run_to_end()
    assert len(harness.plans) == 2


@pytest.mark.parametrize("num_seats", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_rows_that_all_end_in_the_plans_in_flight_are_told_of_and_used_again(
    num_seats: int, max_tokens: int
) -> None:
    """Nothing else is left to plan, and a worker frees only rows that a plan names."""
    rows = {"max_num_seqs": num_seats, "num_rows": 2 * num_seats}
    harness = Harness(
        capacity(num_blocks=40, max_num_batched_tokens=64, **rows), max_plans_in_flight=2
    )
    harness.submit(Outlet(), [1] * (5 * num_seats), max_tokens=max_tokens)
    harness.run_to_end()
    ends = [stream.end for stream in harness.streams.values()]
    assert all(end and end.finish_reason is FinishReason.LENGTH for end in ends)
    assert sum(not plan.rows for plan in harness.plans) <= 2


def test_the_latest_admitted_gives_way_and_resumes_with_its_tokens() -> None:
    harness = Harness(capacity(num_blocks=7, max_model_len=24))
    outlet = Outlet()
    harness.submit(outlet, [8, 7], max_tokens=16)
    while not harness.core.load().num_preemptions_total:
        harness.step()
    waiting = harness.streams[1]
    num_before = len(waiting.tokens)
    assert num_before
    harness.run_to_end()
    resumed = [new for plan in harness.plans for new in plan.new_sequences if new.output_token_ids]
    assert [len(new.output_token_ids) for new in resumed] == [num_before]
    assert resumed[0].num_computed_tokens == 0
    assert len(waiting.tokens) == 16
    assert waiting.end is not None
    assert waiting.end.stats.num_preemptions == 1


def test_a_preempted_sequence_is_admitted_before_those_that_wait() -> None:
    harness = Harness(capacity(num_blocks=7, max_model_len=24))
    outlet = Outlet()
    harness.submit(outlet, [8, 7], max_tokens=16)
    harness.step()
    harness.submit(outlet, [9], max_tokens=8)
    harness.run_to_end()
    order = [new.prompt_token_ids for plan in harness.plans for new in plan.new_sequences]
    assert [len(prompt) for prompt in order] == [8, 7, 7, 9]


def test_nobody_is_admitted_into_the_block_that_a_running_one_needs_next() -> None:
    """No thrash: the newcomer would be pushed out at once."""
    harness = Harness(capacity(num_blocks=5, max_model_len=16))
    outlet = Outlet()
    harness.submit(outlet, [8], max_tokens=8)
    harness.step()
    harness.submit(outlet, [5], max_tokens=2)
    harness.run_to_end()
    assert harness.core.load().num_preemptions_total == 0


def test_a_preemption_storm_ends_with_progress_for_everybody() -> None:
    harness = Harness(capacity(num_blocks=17, max_num_seqs=8, num_rows=16), max_plans_in_flight=2)
    harness.submit(Outlet(), [4] * 8, max_tokens=40)
    harness.run_to_end()
    # Everybody recomputing at every step would be hundreds.
    assert harness.core.load().num_preemptions_total < 40


@pytest.mark.parametrize("is_aborted", [True, False])
def test_blocks_that_are_about_to_come_back_spare_a_preemption(is_aborted: bool) -> None:
    """The plan in flight surely ends the short one, or it was aborted while named there."""
    harness = Harness(capacity(num_blocks=5, max_model_len=16), max_plans_in_flight=2)
    outlet = Outlet()
    harness.submit(outlet, [1], max_tokens=4)
    harness.submit(outlet, [9], max_tokens=5)
    for _ in range(3):
        harness.plan()
        harness.take_result()
    assert scheduled(harness.plan()) == [(3, 1), (11, 1)]
    if is_aborted:
        harness.abort(0)
    assert harness.core.load().num_free_blocks == 0
    assert harness.plan() is None, "the long one waits for the block"
    harness.run_to_end()
    assert harness.core.load().num_preemptions_total == 0
    assert len(harness.streams[1].tokens) == 5


def test_a_run_of_several_tokens_is_caught_up_in_one_step() -> None:
    harness = Harness(capacity(is_replay=True), run_length=3)
    harness.submit(Outlet(), [5], max_tokens=9)
    harness.run_to_end()
    assert [scheduled(plan) for plan in harness.plans] == [[(0, 5)], [(5, 3)], [(8, 3)]]


def test_a_worker_that_does_not_end_a_full_row_breaks_the_contract() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], max_tokens=3)
    for _ in range(2):
        harness.step()
    harness.plan()
    harness.results[0].finish_codes[0] = 0
    harness.in_flight.clear()
    harness.core.take_result(harness.results.popleft(), 1.0)
    with pytest.raises(WorkerContractError, match="has its 8 tokens"):
        harness.core.plan(1.0)


def test_an_ended_row_is_announced_once_and_used_again_only_after_that() -> None:
    harness = Harness(capacity(num_rows=2, max_num_seqs=1))
    harness.submit(Outlet(), [2, 2, 2], max_tokens=1)
    harness.run_to_end()
    assert [plan.rows for plan in harness.plans] == [[0], [1], [0]]
    assert [plan.freed_rows for plan in harness.plans] == [[], [0], [1]]


def test_an_idle_batch_orders_nothing() -> None:
    harness = Harness(capacity())
    assert harness.plan() is None
    harness.submit(Outlet(), [5], max_tokens=1)
    harness.run_to_end()
    assert harness.plan() is None


def test_a_preempted_sequence_waits_for_the_plan_that_still_names_it() -> None:
    harness = Harness(capacity(num_blocks=64), max_plans_in_flight=2)
    harness.submit(Outlet(), [5], max_tokens=20)
    harness.plan()
    batch = harness.core._replicas[0].batch  # no event preempts a sequence that has room
    assert batch is not None
    running = next(iter(batch.running))
    batch._preempt(running)
    assert running.state is SequenceState.WAITING
    assert harness.plan() is None
    harness.take_result()
    assert len(harness.streams[0].tokens) == 1
    plan = harness.plan()
    assert scheduled(plan) == [(0, 6)]
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 20


def with_drafts(num_drafts: int, window: int = 1, **changes: int) -> Harness:
    limits = capacity(num_speculative_tokens=num_drafts, **({"num_blocks": 60} | changes))
    return Harness(limits, max_plans_in_flight=window)


def test_a_decoding_sequence_orders_its_token_and_room_for_drafts() -> None:
    harness = with_drafts(3)
    harness.submit(Outlet(), [5], max_tokens=20)
    assert scheduled(harness.plan()) == [(0, 5)]
    harness.take_result()
    assert scheduled(harness.plan()) == [(5, 4)]
    kept = harness.results[0].num_accepted_tokens[0]
    harness.take_result()
    assert scheduled(harness.plan()) == [(6 + kept, 4)]


def test_a_plan_ahead_counts_one_token_of_the_plan_in_flight() -> None:
    harness = with_drafts(3, window=2)
    harness.submit(Outlet(), [5], max_tokens=30)
    assert [scheduled(harness.plan()) for _ in range(2)] == [[(0, 5)], [(5, 4)]]
    position = 5
    for _ in range(5):
        harness.take_result()
        # The result that was read is exact; the one in flight has kept one token at least.
        position += 1
        assert scheduled(harness.plan()) == [(position, 4)]
        position += harness.results[0].num_accepted_tokens[0]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_with_blocks_to_spare_every_draft_finds_its_place(num_drafts: int, window: int) -> None:
    harness = with_drafts(num_drafts, window, block_size_tokens=1, num_blocks=200)
    harness.submit(Outlet(), [5, 4, 1], max_tokens=40)
    harness.run_to_end()
    assert harness.core.load().num_drafts_total > 20
    assert harness.worker.num_without_place == 0


def test_the_budget_of_a_step_counts_drafts() -> None:
    harness = with_drafts(3, max_num_batched_tokens=12)
    outlet = Outlet()
    harness.submit(outlet, [4, 4], max_tokens=20)
    harness.step()
    harness.submit(outlet, [40])
    plan = harness.plan()
    assert [count for _, count in scheduled(plan)] == [4, 4, 4]


def test_blocks_for_drafts_are_taken_before_they_are_needed() -> None:
    harness = with_drafts(3, block_size_tokens=4)
    harness.submit(Outlet(), [5], max_tokens=30)
    plan = harness.plan()
    assert plan is not None
    # Seven positions: five of the prompt, two that later passes of drafting write.
    assert plan.num_new_blocks == [2]
    harness.take_result()
    plan = harness.plan()
    assert plan is not None
    # From position 5: a token and three drafts, and two positions for the next drafts.
    assert plan.num_new_blocks == [1]


def test_nobody_is_pushed_out_for_drafts() -> None:
    """Two sequences fill the pool exactly; drafts find no block, and nobody needs one more."""
    harness = with_drafts(3, block_size_tokens=4, num_blocks=7, max_model_len=16)
    harness.submit(Outlet(), [8, 8], max_tokens=4)
    harness.run_to_end()
    assert harness.core.load().num_preemptions_total == 0


def test_a_resumed_sequence_starts_without_drafts() -> None:
    harness = with_drafts(3, num_blocks=9, max_model_len=24)
    harness.submit(Outlet(), [8, 7], max_tokens=16)
    while not harness.core.load().num_preemptions_total:
        harness.step()
    num_known = harness.streams[1].num_prompt + len(harness.streams[1].tokens)
    while (plan := harness.plan()) is None or not plan.new_sequences:
        harness.take_result()
    place = plan.rows.index(plan.new_sequences[0].row)
    first, count = scheduled(plan)[place]
    assert first + count == num_known
    harness.run_to_end()


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_step_smaller_than_the_drafts_of_a_sequence_serves_with_fewer(num_tokens: int) -> None:
    harness = with_drafts(3, max_num_batched_tokens=num_tokens)
    harness.submit(Outlet(), [5, 2], max_tokens=8)
    harness.run_to_end()
    assert max(max(plan.num_scheduled_tokens) for plan in harness.plans) <= num_tokens
