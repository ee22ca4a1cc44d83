"""Complete sampling settings."""

import math
from typing import Any

import pytest

from services.frontend.errors import ApiError
from services.frontend.sampling import (
    Seeds,
    build_sampling,
    choice_seed,
    resolve_max_tokens,
    sampling_defaults,
)
from services.frontend.schemas.fields import GenerationFields
from services.frontend.validation import parse
from shared.errors import CheckpointError
from shared.sampling import SamplingSpec

DEFAULTS = sampling_defaults({"temperature": 0.7, "top_p": 0.9, "top_k": 50}, [2, 3])


def build(**fields: Any) -> SamplingSpec:
    return build_sampling(
        parse(GenerationFields, fields),
        DEFAULTS,
        max_tokens=8,
        num_logprobs=None,
        check_ids=lambda ids, name: None,
        seeds=Seeds(),
    )


def test_defaults_come_from_the_checkpoint_and_the_rest_is_off() -> None:
    spec = build()
    assert (spec.temperature, spec.top_p, spec.top_k) == (0.7, 0.9, 50)
    assert (spec.min_p, spec.repetition_penalty, spec.presence_penalty) == (0.0, 1.0, 0.0)
    assert (spec.eos_token_ids, spec.max_tokens, spec.num_logprobs) == ((2, 3), 8, None)


def test_a_checkpoint_that_does_not_sample_is_greedy() -> None:
    assert sampling_defaults({"do_sample": False, "temperature": 0.6}, []).temperature == 0.0


def test_values_of_the_request_win_also_when_they_are_zero() -> None:
    spec = build(temperature=0, top_k=0, top_p=1)
    assert (spec.temperature, spec.top_k, spec.top_p) == (0.0, 0, 1.0)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 1e-300}, "temperature", 0.0),
        ({"top_p": 1e-300}, "top_p", 1e-9),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**30}, "top_k", 0),
        ({"seed": -1}, "seed", 2**64 - 1),
    ],
)
def test_numbers_that_no_float32_or_wire_holds_are_made_to_fit(
    fields: dict[str, Any], name: str, value: float
) -> None:
    assert getattr(build(**fields), name) == value


def test_a_token_that_is_written_in_two_ways_has_two_biases_and_is_refused() -> None:
    assert build(logit_bias={"05": 2}).logit_bias == ((5, 2.0),)
    with pytest.raises(ApiError, match="token id 5 stands twice, once as '05'"):
        build(logit_bias={"5": 1, "05": 2})


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [(None, None, 90), (None, 16, 16), (None, 99, 90), (90, 1, 90)],
)
def test_the_bound_is_what_was_asked_else_the_default_else_the_room(
    asked: int | None, default: int | None, expected: int
) -> None:
    found = resolve_max_tokens(asked, num_prompt=10, limit=100, default=default, param="p")
    assert found == expected


@pytest.mark.parametrize(("asked", "num_prompt"), [(91, 10), (None, 100), (1, 100), (None, 500)])
def test_no_room_is_a_context_error(asked: int | None, num_prompt: int) -> None:
    with pytest.raises(ApiError) as caught:
        resolve_max_tokens(asked, num_prompt=num_prompt, limit=100, default=None, param="p")
    assert caught.value.code == "context_length_exceeded"


def test_the_first_choice_has_the_base_seed_and_all_choices_differ() -> None:
    seeds = [choice_seed(7, i) for i in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[1] != choice_seed(8, 1)


def test_unseeded_requests_get_different_seeds() -> None:
    assert build().seed != build().seed


def test_seeds_of_unseeded_requests_follow_from_the_gateways_seed_and_their_order() -> None:
    first, again, other = Seeds(1024), Seeds(1024), Seeds(-1)
    drawn = [first.draw() for _ in range(64)]
    assert drawn == [again.draw() for _ in range(64)]
    assert len(set(drawn)) == 64
    assert not set(drawn) & {other.draw() for _ in range(64)}


def test_a_seed_from_the_log_can_be_sent() -> None:
    seeds = [Seeds(given).draw() for given in (None, 0, 1024, -(2**63)) for _ in range(16)]
    assert all(parse(GenerationFields, {"seed": seed}).seed == seed for seed in seeds)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1, 99, "x", True, math.nan)),
        *(("top_p", value) for value in (0, 2, "a", [])),
        *(("top_k", value) for value in (1.5, -5, 1 << 40, "5")),
        *(("min_p", value) for value in (-0.1, 7)),
        *(("repetition_penalty", value) for value in (0, -1)),
        *(("do_sample", value) for value in ("x", 2)),
    ],
)
def test_a_checkpoint_cannot_set_what_no_request_may_ask_for(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {name} is"):
        sampling_defaults({name: value}, [2])


def test_a_checkpoint_that_sets_nothing_switches_everything_off() -> None:
    nothing = {"temperature": None, "top_k": None, "do_sample": None}
    assert sampling_defaults(nothing, []) == SamplingSpec()
