"""A result is held against its plan; one row's trouble is that row's alone."""

import dataclasses
from array import array
from collections.abc import Callable

import pytest

from services.scheduler.outlet import Outlet
from services.scheduler.plan import FinishCode, StepResult, WorkerContractError
from shared.errors import FailureReason, RequestError
from shared.sampling import TokenLogprobs
from tests.services.scheduler.builders import capacity
from tests.services.scheduler.harness import Harness

Twist = Callable[[StepResult], StepResult]


def with_columns(**columns: object) -> Twist:
    return lambda result: dataclasses.replace(result, **columns)


@pytest.mark.parametrize(
    ("twist", "message"),
    [
        (with_columns(step=9), "result of step 9, step 2 expected"),
        (with_columns(rows=[5, 4]), "other rows"),
        (with_columns(rows=[]), "other rows"),
        (
            with_columns(num_computed_tokens=[5, 9]),
            "row 1 echoes 9 computed tokens",
        ),
        (with_columns(num_computed_tokens=[5]), "echoes"),
        (with_columns(num_sampled_tokens=[1]), "unequal length"),
        (with_columns(finish_codes=[0]), "unequal length"),
        (with_columns(token_ids=array("I", [1])), "1 token ids, 2 counted"),
        (with_columns(finish_codes=[0, 5]), "unknown finish code 5"),
        (with_columns(num_sampled_tokens=[0, 2]), "row 0 brings no token"),
        (with_columns(num_sampled_tokens=[2, 0]), "row 0 brings 2 tokens where one was ordered"),
        (with_columns(logprobs=[TokenLogprobs(logprob=0.0, rank=1)]), "too many logprobs"),
    ],
)
def test_a_result_that_does_not_answer_its_plan_ends_the_epoch(twist: Twist, message: str) -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5, 4])
    harness.step()
    harness.plan()
    with pytest.raises(WorkerContractError, match=message):
        harness.core.take_result(twist(harness.results[0]), 1.0)


def test_a_result_without_a_plan_ends_the_epoch() -> None:
    with pytest.raises(WorkerContractError, match="without a plan"):
        Harness(capacity()).core.take_result(StepResult(step=1), 0.0)


def test_a_token_before_the_end_of_the_prompt_ends_the_epoch() -> None:
    harness = Harness(capacity(max_num_batched_tokens=4))
    harness.submit(Outlet(), [9])
    harness.plan()
    result = dataclasses.replace(
        harness.results[0], num_sampled_tokens=[1], token_ids=array("I", [3])
    )
    with pytest.raises(WorkerContractError, match="before the end of its known tokens"):
        harness.core.take_result(result, 1.0)


def test_missing_logprobs_end_the_epoch() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], num_logprobs=0)
    harness.plan()
    with pytest.raises(WorkerContractError, match="too few logprobs"):
        harness.core.take_result(dataclasses.replace(harness.results[0], logprobs=[]), 1.0)


def test_a_first_token_past_the_limit_ends_the_epoch() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], max_tokens=1)
    harness.plan()
    with pytest.raises(WorkerContractError, match="was not ended"):
        harness.core.take_result(dataclasses.replace(harness.results[0], finish_codes=[0]), 1.0)


def test_a_row_that_fails_alone_does_not_touch_the_others() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5, 4, 3], num_logprobs=0)
    harness.step()
    harness.plan()
    result = harness.results[0]
    place = result.rows.index(1)
    del result.token_ids[place]
    del result.logprobs[place]
    result.num_sampled_tokens[place] = 0
    error = RequestError(FailureReason.NUMERICAL_ERROR, "logits are not finite")
    result.row_failures[1] = error
    harness.worker.rows[1].is_over = True
    harness.take_result()
    end = harness.streams[1].end
    assert end is not None
    assert end.failure is error
    assert len(harness.streams[1].tokens) == 1
    harness.run_to_end()
    assert [len(harness.streams[n].tokens) for n in (0, 2)] == [8, 8]


def test_tokens_of_a_sequence_that_left_are_dropped_and_not_counted() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5, 4], max_tokens=4)
    harness.plan()
    harness.abort(0)
    harness.take_result()
    assert harness.streams[0].tokens == []
    harness.run_to_end()
    assert harness.core.load().num_output_tokens_total == 4


def test_logprobs_follow_the_rows_that_asked_for_them() -> None:
    harness = Harness(capacity())
    outlet = Outlet()
    for num_logprobs in (0, None, 0):
        harness.submit(outlet, [4], num_logprobs=num_logprobs)
    harness.plan()
    harness.abort(0)
    harness.run_to_end()
    assert len(harness.streams[2].tokens) == 8


@pytest.mark.parametrize("window", [1, 2])
def test_an_end_of_the_worker_ends_the_sequence(window: int) -> None:
    harness = Harness(capacity(), max_plans_in_flight=window)
    harness.ends_at[0] = (8, FinishCode.EOS)
    harness.submit(Outlet(), [5], max_tokens=20)
    harness.run_to_end()
    assert len(harness.streams[0].tokens) == 3


def drafting() -> Harness:
    """One sequence with three drafts whose first run waits to be read."""
    harness = Harness(capacity(num_speculative_tokens=3, num_blocks=40))
    harness.submit(Outlet(), [5], max_tokens=20)
    harness.step()
    harness.plan()
    return harness


def run_of(count: int, drafted: int, accepted: int, code: int = 0) -> Twist:
    return with_columns(
        num_sampled_tokens=[count],
        token_ids=array("I", [1] * count),
        num_drafted_tokens=[drafted],
        num_accepted_tokens=[accepted],
        finish_codes=[code],
    )


@pytest.mark.parametrize(
    ("twist", "message"),
    [
        (run_of(3, 3, 1), "row 0 brings 3 tokens, 1 of 3 drafts among them"),
        (run_of(1, 3, 1), "row 0 brings 1 tokens, 1 of 3 drafts among them"),
        (run_of(3, 1, 2), "row 0 brings 3 tokens, 2 of 1 drafts among them"),
        (run_of(2, 3, 3, code=1), "row 0 brings 2 tokens, 3 of 3 drafts among them"),
        (run_of(5, 4, 4), "more drafts than were ordered"),
        (run_of(0, 3, 0), "row 0 brings no token"),
        (with_columns(num_drafted_tokens=[]), "columns of drafts for other rows"),
        (with_columns(num_accepted_tokens=[0, 0]), "columns of drafts for other rows"),
    ],
)
def test_a_run_that_its_drafts_do_not_explain_ends_the_epoch(twist: Twist, message: str) -> None:
    harness = drafting()
    with pytest.raises(WorkerContractError, match=message):
        harness.core.take_result(twist(harness.results[0]), 1.0)


def test_drafts_from_a_worker_without_any_end_the_epoch() -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5])
    harness.plan()
    twist = with_columns(num_drafted_tokens=[0], num_accepted_tokens=[0])
    with pytest.raises(WorkerContractError, match="columns of drafts"):
        harness.core.take_result(twist(harness.results[0]), 1.0)


@pytest.mark.parametrize("num_logprobs", [None, 0])
@pytest.mark.parametrize("window", [1, 2])
def test_drafts_are_counted_for_the_sequence_and_in_all(
    window: int, num_logprobs: int | None
) -> None:
    """Both lanes: rows with logprobs take the slow one."""
    harness = Harness(capacity(num_speculative_tokens=3, num_blocks=40), max_plans_in_flight=window)
    harness.submit(Outlet(), [5, 4], max_tokens=25, num_logprobs=num_logprobs)
    drafted = accepted = 0
    while harness.live():
        while harness.plan() is not None:
            drafted += sum(harness.results[-1].num_drafted_tokens)
            accepted += sum(harness.results[-1].num_accepted_tokens)
        harness.take_result()
    stats = [stream.end.stats for stream in harness.streams.values() if stream.end]
    assert sum(one.num_drafted_tokens for one in stats) == drafted > 0
    assert sum(one.num_accepted_tokens for one in stats) == accepted > 0
    load = harness.core.load()
    assert load.num_drafted_tokens_total == drafted
    assert sum(load.num_accepted_tokens_per_position) == accepted
    # Without drafts the tokens would have taken as many steps as there are.
    assert all(one.num_steps < one.num_output_tokens for one in stats)


def test_counters_of_drafts_outlive_their_epoch() -> None:
    harness = drafting()
    harness.take_result()
    before = harness.core.load()
    harness.lose_worker()
    assert harness.core.load().num_drafted_tokens_total == before.num_drafted_tokens_total == 3
    harness.open_epoch()
    harness.run_to_end()
    after = harness.core.load()
    pairs = zip(
        after.num_accepted_tokens_per_position,
        before.num_accepted_tokens_per_position,
        strict=True,
    )
    assert all(now >= then for now, then in pairs)


def test_an_end_inside_a_run_ends_the_sequence() -> None:
    harness = Harness(capacity(num_speculative_tokens=5, num_blocks=40))
    for seed in range(6):
        harness.ends_at[seed] = (9, FinishCode.EOS)
    harness.submit(Outlet(), [5] * 6, max_tokens=20)
    harness.run_to_end()
    assert [len(stream.tokens) for stream in harness.streams.values()] == [4] * 6


ENTRY = TokenLogprobs(logprob=-1.0, rank=2)


def test_logprobs_of_prompts_go_to_the_sequences_that_asked() -> None:
    harness = Harness(capacity())
    outlet = Outlet()
    harness.submit(outlet, [5], num_prompt_logprobs=0)
    harness.plan()
    row = harness.results[0].rows[0]
    twist = with_columns(prompt_logprobs=[(row, 1, [ENTRY] * 4)])
    harness.core.take_result(twist(harness.results[0]), 1.0)
    delivery = outlet.take()
    assert delivery is not None
    assert delivery.tokens is not None
    (stream_id,) = delivery.tokens.stream_ids
    assert delivery.tokens.prompt_logprobs == [(stream_id, 1, [ENTRY] * 4)]


def test_a_chunk_without_a_token_is_delivered_for_what_its_prompt_is_worth() -> None:
    harness = Harness(capacity(max_num_batched_tokens=4))
    outlet = Outlet()
    harness.submit(outlet, [9], num_prompt_logprobs=0)
    harness.plan()
    row = harness.results[0].rows[0]
    twist = with_columns(prompt_logprobs=[(row, 1, [ENTRY] * 4)])
    harness.core.take_result(twist(harness.results[0]), 1.0)
    delivery = outlet.take()
    assert delivery is not None
    assert delivery.tokens is not None
    assert not delivery.tokens.stream_ids
    assert len(delivery.tokens.prompt_logprobs) == 1


@pytest.mark.parametrize(
    ("asked", "entry", "message"),
    [
        (None, (0, 1, [ENTRY]), "unasked"),
        (0, (7, 1, [ENTRY]), "unasked"),
        (0, (0, 0, [ENTRY]), "past its prompt"),
        (0, (0, 3, [ENTRY] * 3), "past its prompt"),
    ],
)
def test_logprobs_of_prompts_that_cannot_be_end_the_epoch(
    asked: int | None, entry: tuple[int, int, list[TokenLogprobs]], message: str
) -> None:
    harness = Harness(capacity())
    harness.submit(Outlet(), [5], num_prompt_logprobs=asked)
    harness.plan()
    place, *rest = entry
    row = harness.results[0].rows[0] + place
    with pytest.raises(WorkerContractError, match=message):
        harness.core.take_result(
            with_columns(prompt_logprobs=[(row, *rest)])(harness.results[0]), 1.0
        )
