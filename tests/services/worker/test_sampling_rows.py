import math

import numpy as np
import pytest

from services.worker.sampling_rows import SamplingRows
from shared.errors import FailureReason, RequestError
from shared.sampling import ThinkingBudget
from tests.services.worker.plans import make_sequence


@pytest.fixture
def rows() -> SamplingRows:
    return SamplingRows(4, 50)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"num_logprobs": 51}, "num_logprobs"),
        ({"num_prompt_logprobs": 51}, "num_prompt_logprobs"),
        ({"logit_bias": ((50, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((4, math.nan),)}, "logit_bias"),
        ({"allowed_token_ids": (50,)}, "allowed_token_ids"),
        ({"bad_words": ((1, 50),)}, "bad_words"),
        (
            {"thinking_budget": ThinkingBudget(max_tokens=1, end_token_id=50)},
            "thinking_budget",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(
    rows: SamplingRows, sampling: dict, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        rows.admit(make_sequence(0, [1], **sampling))
    assert caught.value.field == field
    assert caught.value.reason is FailureReason.INVALID_ARGUMENT


def test_bounds_themselves_are_accepted(rows: SamplingRows) -> None:
    rows.admit(
        make_sequence(
            0,
            [1],
            temperature=0.0,
            top_p=1.0,
            min_p=1.0,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            num_logprobs=50,
            seed=2**64 - 1,
            top_k=10**6,
        )
    )
    assert rows.seed[0] == -1
    assert rows.is_greedy[0]


def test_a_tiny_temperature_is_greedy(rows: SamplingRows) -> None:
    rows.admit(make_sequence(0, [1], temperature=1e-6))
    rows.admit(make_sequence(1, [1], temperature=1e-4))
    assert rows.is_greedy.tolist()[:2] == [True, False]


def test_a_freed_row_forgets_its_shape(rows: SamplingRows) -> None:
    rows.admit(make_sequence(2, [1], presence_penalty=1.0))
    rows.note(np.array([1, 2]), np.array([8, 9]))
    shape = rows.shapes[2]
    assert shape.counts is not None
    assert shape.counts.ids.tolist() == [9]
    rows.free(2)
    assert not rows.shapes
    assert not rows.is_shaped.any()
    rows.admit(make_sequence(2, [1]))
    assert not rows.is_shaped[2]


def test_reset_forgets_every_shape(rows: SamplingRows) -> None:
    rows.admit(make_sequence(2, [1], presence_penalty=1.0))
    rows.reset()
    assert not rows.shapes
    assert not rows.is_shaped.any()
