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
