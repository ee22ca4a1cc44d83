"""Ids behind words, budgets and cuts."""

import pytest

from services.frontend.errors import ApiError
from services.frontend.gateway import Gateway
from services.frontend.schemas.fields import GenerationFields
from services.frontend.token_limits import truncated, with_thinking_budget, with_token_limits
from shared.glm.render import RenderedPrompt
from shared.sampling import SamplingSpec


def limited(gateway: Gateway, **fields: object) -> SamplingSpec:
    return with_token_limits(gateway, GenerationFields(**fields), SamplingSpec())


def test_a_word_is_forbidden_at_the_beginning_and_behind_a_space(lone_gateway: Gateway) -> None:
    encode = lone_gateway.dialect.encode
    runs = limited(lone_gateway, bad_words=["hello"]).bad_words
    assert runs[0] == tuple(encode("hello", allow_control=False))
    spaced = tuple(encode(" hello", allow_control=False))
    assert (spaced in runs) is (len(spaced) == len(runs[0]))


def test_a_word_that_spells_a_control_token_is_text(lone_gateway: Gateway) -> None:
    runs = limited(lone_gateway, bad_words=["</think>"]).bad_words
    assert lone_gateway.dialect.control.end_think not in runs[0]


def test_no_limits_leave_the_sampling_as_it_is(lone_gateway: Gateway) -> None:
    assert limited(lone_gateway) == SamplingSpec()


@pytest.mark.parametrize(("budget", "bound"), [(0, 0), (3, 3), (10**30, 16)])
def test_a_budget_is_never_more_than_the_answer(
    lone_gateway: Gateway, budget: int, bound: int
) -> None:
    prompt = RenderedPrompt(token_ids=[1], text="", starts_in_reasoning=True)
    spec = with_thinking_budget(lone_gateway, budget, prompt, SamplingSpec(max_tokens=16))
    assert spec.thinking_budget is not None
    assert spec.thinking_budget.max_tokens == bound


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 2}, [3, 4]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4]),
    ],
)
def test_a_prompt_is_cut_as_asked(fields: dict, left: list[int]) -> None:
    request = GenerationFields(**fields)
    assert truncated(request, [1, 2, 3, 4], limit=10, max_tokens=6) == left


def test_what_fits_leaves_room_for_the_answer() -> None:
    request = GenerationFields(truncate_prompt_tokens=-1)
    assert truncated(request, [1, 2, 3, 4], limit=10, max_tokens=7) == [2, 3, 4]


@pytest.mark.parametrize("most", [0, 11])
def test_a_cut_outside_the_context_is_refused(most: int) -> None:
    with pytest.raises(ApiError) as caught:
        truncated(GenerationFields(truncate_prompt_tokens=most), [1], limit=10, max_tokens=None)
    assert caught.value.param == "truncate_prompt_tokens"
