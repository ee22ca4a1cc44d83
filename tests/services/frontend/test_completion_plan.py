"""What a completions body may say."""

from typing import Any

import httpx
import pytest

from tests.services.frontend.conftest import NAME, Mesh

ACCEPTED = 503  # the lone gateway has no detokenizer: everything before it was fine

REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": ""}, "prompt", "empty_string"),
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [[]]}, "prompt", "empty_array"),
    ({"prompt": [""]}, "prompt", "empty_string"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty_string"),
    ({"prompt": ["a", 5]}, "prompt", "invalid_type"),
    ({"prompt": [[1], ["a"]]}, "prompt", "invalid_type"),
    ({"prompt": [True, False]}, "prompt", "invalid_type"),
    ({"prompt": [1.5]}, "prompt", "invalid_type"),
    ({"prompt": {"text": "a"}}, "prompt", "invalid_type"),
    ({"prompt": [896]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [[5], [10**20]]}, "prompt[1]", "invalid_value"),
    ({"prompt": ["a"] * 129}, "prompt", "array_above_max_length"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "integer_above_max_value"),
    ({"prompt": [5] * 8192}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 8191, "max_tokens": 2}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "integer_below_min_value"),
    ({"suffix": "x"}, "suffix", "unsupported_value"),
    ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"prompt": [[5] * 8000] * 8, "prompt_logprobs": 20}, "prompt_logprobs", "invalid_value"),
    ({"prompt": [[5] * 8000] * 8, "echo": True, "logprobs": 20}, "logprobs", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"guided_choice": []}, "guided_choice", "empty_array"),
    ({"best_of": 3}, "best_of", "unsupported_value"),
    ({"prompt_embeds": "x"}, "prompt_embeds", "unsupported_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stop": ["a"] * 5}, "stop", "array_above_max_length"),
]

TAKEN: list[dict[str, Any]] = [
    {},
    {"prompt": ["a", "b"]},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6], [7]]},
    {"prompt": [5] * 8191},
    {"prompt": "x <|user|>"},
    {"logprobs": 0},
    {"echo": True, "n": 3},
    {"suffix": "", "best_of": None},
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_wrong_is_refused_with_its_field(
    lone: httpx.AsyncClient, fields: dict[str, Any], param: str | None, code: str
) -> None:
    response = await lone.post("/v1/completions", json={"prompt": "Hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


@pytest.mark.parametrize("fields", TAKEN, ids=lambda value: str(value)[:60])
async def test_what_is_right_reaches_the_detokenizer(
    lone: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    response = await lone.post("/v1/completions", json={"prompt": "Hi", **fields})
    assert response.status_code == ACCEPTED, response.text


async def test_a_prompt_is_required(lone: httpx.AsyncClient) -> None:
    error = (await lone.post("/v1/completions", json={"model": NAME})).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


async def test_choices_stand_prompt_by_prompt_with_seeds_by_choice(mesh: Mesh) -> None:
    await mesh.complete(prompt=["a", "b"], n=2, seed=7, echo=True)
    submit = mesh.fake.submits[0].submit
    assert [s.index for s in submit.sequences] == [0, 1, 2, 3]
    assert submit.sequences[0].prompt_token_ids == submit.sequences[1].prompt_token_ids
    assert submit.sequences[1].prompt_token_ids != submit.sequences[2].prompt_token_ids
    seeds = [s.seed for s in submit.sequences]
    assert seeds[0] == seeds[2] == 7
    assert seeds[1] == seeds[3] != 7
    assert list(submit.output.echo_texts) == ["a", "a", "b", "b"]


async def test_without_a_bound_it_is_sixteen_tokens_or_the_room_left(mesh: Mesh) -> None:
    await mesh.complete()
    await mesh.complete(prompt=[5] * 8190)
    assert [s.submit.sampling.max_tokens for s in mesh.fake.submits] == [16, 2]


async def test_raw_prompts_may_spell_control_tokens(mesh: Mesh) -> None:
    await mesh.complete(prompt="<|user|>")
    ids = mesh.fake.submits[0].submit.sequences[0].prompt_token_ids
    assert ids == mesh.gateway.dialect.control.user.to_bytes(4, "little")


async def test_echoed_ids_are_shown_as_text(mesh: Mesh) -> None:
    ids = mesh.gateway.dialect.encode("hello there", allow_control=False)
    await mesh.complete(prompt=ids, echo=True)
    assert list(mesh.fake.submits[0].submit.output.echo_texts) == ["hello there"]


async def test_no_parser_runs_on_completions(mesh: Mesh) -> None:
    await mesh.complete(logprobs=2)
    output = mesh.fake.submits[0].submit.output
    assert not output.parse_reasoning
    assert (output.include_logprobs, output.num_top_logprobs) == (True, 2)


async def test_an_echo_shows_the_prompt_as_it_was_cut(mesh: Mesh) -> None:
    ids = mesh.gateway.dialect.encode("one two three", allow_control=False)
    await mesh.complete(prompt=ids, echo=True, truncate_prompt_tokens=1)
    submit = mesh.fake.submits[0].submit
    assert submit.sequences[0].prompt_token_ids == ids[-1].to_bytes(4, "little")
    assert list(submit.output.echo_texts) == [mesh.gateway.dialect.decode(ids[-1:])]


async def test_prompts_are_measured_as_far_as_somebody_asks(mesh: Mesh) -> None:
    await mesh.complete(echo=True, logprobs=2, stream=True)
    await mesh.complete(prompt_logprobs=0)
    await mesh.complete(prompt_logprobs=1, echo=True, logprobs=3)
    await mesh.complete(logprobs=3)
    await mesh.chat(prompt_logprobs=4)
    asked = [
        s.submit.sampling.num_prompt_logprobs
        if s.submit.sampling.HasField("num_prompt_logprobs")
        else None
        for s in mesh.fake.submits
    ]
    assert asked == [2, 0, 3, None, 4]
    shown = [s.submit.output.include_prompt_logprobs for s in mesh.fake.submits]
    assert shown == [True, True, True, False, True]


async def test_a_prompt_alone_is_asked_for_by_no_tokens(mesh: Mesh) -> None:
    await mesh.complete(echo=True, max_tokens=0, logprobs=1)
    submit = mesh.fake.submits[0].submit
    assert (submit.sampling.max_tokens, submit.output.is_prompt_only) == (1, True)
    assert submit.sampling.num_prompt_logprobs == 1


class TestReplay:
    """A gateway without a model."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"worker_mode": "replay"}

    @pytest.mark.parametrize(
        ("fields", "param"),
        [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"echo": True, "logprobs": 1}, "echo")],
    )
    async def test_nothing_measures_prompts(
        self, mesh: Mesh, fields: dict[str, Any], param: str
    ) -> None:
        response = await mesh.complete(replay={"text": "x"}, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
