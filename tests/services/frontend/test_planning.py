"""What both endpoints share."""

from typing import Any

import pytest

from services.frontend.errors import ApiError
from services.frontend.gateway import Gateway
from services.frontend.planning import check_common, new_response_id, replay_script, sequences_of
from services.frontend.schemas.fields import GenerationFields, Replay
from services.frontend.validation import parse
from services.frontend.visit import Visit
from shared.sampling import ReplayScript


def request(**fields: Any) -> GenerationFields:
    return parse(GenerationFields, fields)


def test_sequences_are_bounded_over_prompts_and_choices(lone_gateway: Gateway) -> None:
    check_common(lone_gateway, request(n=2), num_prompts=64)
    with pytest.raises(ApiError) as caught:
        check_common(lone_gateway, request(n=3), num_prompts=43)
    assert caught.value.param == "n"


def test_unknown_stream_options_are_named(lone_gateway: Gateway) -> None:
    asked = request(stream=True, stream_options={"foo": 1})
    assert check_common(lone_gateway, asked, num_prompts=1) == ["stream_options.foo"]


def test_choices_of_a_prompt_share_its_ids_and_differ_in_seed() -> None:
    first, second = [1, 2], [3]
    script = ReplayScript(token_ids=(9,))
    found = sequences_of([first, second], 2, 5, script)
    assert [s.index for s in found] == [0, 1, 2, 3]
    assert [s.prompt_token_ids for s in found] == [first, first, second, second]
    assert found[0].prompt_token_ids is found[1].prompt_token_ids
    assert found[0].seed == found[2].seed == 5
    assert found[1].seed == found[3].seed != 5
    assert all(s.replay is script for s in found)


async def test_a_script_of_ids_is_taken_as_it_is(lone_gateway: Gateway) -> None:
    assert await replay_script(lone_gateway, None) is None
    script = await replay_script(lone_gateway, Replay(token_ids=[5, 6]))
    assert script == ReplayScript(token_ids=(5, 6), tokens_per_step=(1,))
    empty = await replay_script(lone_gateway, Replay(text=""))
    assert empty == ReplayScript(token_ids=())


def test_ids_of_answers_are_fresh_and_noted() -> None:
    visit = Visit({"headers": []})
    first = new_response_id("cmpl", request(request_id="label"), visit, 7)
    assert (visit.response_id, visit.request_id, visit.seed) == (first, "label", 7)
    assert first != new_response_id("cmpl", request(), visit, 7)
