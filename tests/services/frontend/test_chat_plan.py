"""What a chat body may say: one row per rule, with the whole error a client sees."""

from typing import Any

import httpx
import pytest

from tests.services.frontend.conftest import NAME, Mesh

ACCEPTED = 503  # the lone gateway has no detokenizer: everything before it was fine
TOOL = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
ASKING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
SMALL = 8192  # context of glm-nano


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", **function}}


# (fields that replace those of a good body, param, code)
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    # messages
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "function", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": 1, "content": "Hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_array"),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_tape"}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": ["Hi"]}]},
        "messages[0].content[0]",
        "invalid_type",
    ),
    (
        {"messages": [USER, ASKING, {"role": "tool", "content": "x"}]},
        "messages[2].tool_call_id",
        "missing_required_parameter",
    ),
    ({"messages": [USER, ANSWER]}, "messages[1].role", "invalid_value"),
    (
        {"messages": [USER, ASKING, {**ANSWER, "tool_call_id": "c9"}]},
        "messages[2].tool_call_id",
        "invalid_value",
    ),
    ({"messages": [USER, ASKING, USER]}, "messages[2].role", "invalid_value"),
    ({"messages": [USER, ASKING]}, "messages[1].role", "invalid_value"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c1"}]}]},
        "messages[1].tool_calls[0].function",
        "missing_required_parameter",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "now"}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
        "missing_required_parameter",
    ),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "invalid_value"),
    (
        {"messages": [{**USER, "function_call": {}}]},
        "messages[0].function_call",
        "unsupported_value",
    ),
    # sampling
    ({"temperature": -1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 3}, "temperature", "decimal_above_max_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": "0.5"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "decimal_below_min_value"),
    ({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 2}, "min_p", "decimal_above_max_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": -1}, "n", "integer_below_min_value"),
    ({"n": 100000}, "n", "integer_above_max_value"),
    ({"n": 1.0}, "n", "invalid_type"),
    ({"seed": "1"}, "seed", "invalid_type"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"seed": -(2**63) - 1}, "seed", "integer_below_min_value"),
    ({"logit_bias": {"5": 200}}, "logit_bias.5", "decimal_above_max_value"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"882": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    # length
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_tokens": 1e30}, "max_tokens", "invalid_type"),
    ({"max_tokens": 10**30}, "messages", "context_length_exceeded"),
    ({"max_tokens": SMALL}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": SMALL}, "messages", "context_length_exceeded"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    # stops
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "array_above_max_length"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": [5]}, "stop[0]", "invalid_type"),
    ({"stop": "é" * 129}, "stop", "invalid_value"),
    ({"stop_token_ids": [882]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", "invalid_type"),
    # logprobs
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    # streams
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "invalid_value",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_value",
    ),
    # formats
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    # tools
    ({"tools": []}, "tools", "empty_array"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"function": {"name": "now"}}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [{**TOOL, "type": "retrieval"}]}, "tools[0].type", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
        "missing_required_parameter",
    ),
    ({"tools": [tool(name="two words")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters", "invalid_type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [TOOL] * 129}, "tools", "array_above_max_length"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "invalid_value"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function"}},
        "tool_choice.function.name",
        "missing_required_parameter",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": "bogus"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": 5}, "tool_choice", "invalid_type"),
    # thinking
    ({"reasoning_effort": "bogus"}, "reasoning_effort", "invalid_value"),
    (
        {"chat_template_kwargs": {"enable_thinking": "no"}},
        "chat_template_kwargs.enable_thinking",
        "invalid_type",
    ),
    (
        {"chat_template_kwargs": {"thinking": False}},
        "chat_template_kwargs.thinking",
        "unsupported_value",
    ),
    (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs.chat_template",
        "unsupported_value",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
    ),
    # the rest
    ({"user": 5}, "user", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "string_below_min_length"),
    ({"cache_salt": "a" * 129}, "cache_salt", "string_above_max_length"),
    ({"cache_salt": "a/b"}, "cache_salt", "invalid_value"),
    ({"replay": {"text": "x"}}, "replay", "unsupported_value"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_value"),
    ({"thinking_token_budget": -5}, "thinking_token_budget", "integer_below_min_value"),
    ({"allowed_token_ids": [882]}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [1] * 8193}, "allowed_token_ids", "array_above_max_length"),
    ({"bad_words": [""]}, "bad_words[0]", "string_below_min_length"),
    ({"bad_words": [" "]}, "bad_words[0]", "invalid_value"),
    ({"bad_words": ["x"] * 65}, "bad_words", "array_above_max_length"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "integer_below_min_value"),
    ({"truncate_prompt_tokens": 8193}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncation_side": "top"}, "truncation_side", "invalid_value"),
    ({"priority": 2**31}, "priority", "integer_above_max_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"stream_interval": 5}, "stream_interval", "unsupported_value"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "unsupported_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "integer_below_min_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "integer_above_max_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"functions": [{"name": "now"}]}, "functions", "unsupported_value"),
]

TAKEN: list[dict[str, Any]] = [
    {},
    {"model": None},
    {"model": "alias"},
    {"n": None, "temperature": None, "stop": None, "tools": None, "logit_bias": None},
    {"n": 2, "temperature": 0},
    {"temperature": 2, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.1},
    {"temperature": 1e-300, "top_p": 1e-300, "top_k": 10**30},
    {"seed": -(2**63)},
    {"max_tokens": 1, "max_completion_tokens": 5},
    {"logit_bias": {"5": -100, "881": 100}},
    {"stop": "x"},
    {"stop": ["a", "b", "c", "d"]},
    {"logprobs": True, "top_logprobs": 20},
    {"logprobs": False},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"response_format": {"type": "text"}},
    {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
    {"tools": [tool(description=None, parameters={"type": "object"}, strict=True)]},
    {"tool_choice": "none"},
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"chat_template_kwargs": {"enable_thinking": False, "clear_thinking": None}},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {"messages": [USER, ASKING, ANSWER, USER]},
    {"messages": [USER, {"role": "assistant", "reasoning": "hm", "content": None}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "x", "refusal": None}, USER]},
    {"modalities": ["text"], "store": False, "service_tier": "auto", "best_of": 1},
    {"functions": None, "metadata": {"a": "b"}, "priority": -3},
    {"prompt_cache_key": "k", "safety_identifier": "s", "session_id": "x"},
    {"bad_words": ["no", "never again"], "echo": True},
    {"allowed_token_ids": [5], "bad_words": ["x"], "response_format": {"type": "json_object"}},
    {"thinking_token_budget": 0},
    {"thinking_token_budget": -1, "truncate_prompt_tokens": -1, "truncation_side": "right"},
]


def good(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [USER], **fields}


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_wrong_is_refused_with_its_field(
    lone: httpx.AsyncClient, fields: dict[str, Any], param: str | None, code: str
) -> None:
    response = await lone.post("/v1/chat/completions", json=good(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("fields", TAKEN, ids=lambda value: str(value)[:60])
async def test_what_is_right_reaches_the_detokenizer(
    lone: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    response = await lone.post("/v1/chat/completions", json=good(**fields))
    assert response.status_code == ACCEPTED, response.text


async def test_messages_are_required(lone: httpx.AsyncClient) -> None:
    error = (await lone.post("/v1/chat/completions", json={"model": NAME})).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


async def test_an_unknown_model_is_not_found(lone: httpx.AsyncClient) -> None:
    response = await lone.post("/v1/chat/completions", json=good(model="gpt-9"))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "model_not_found")
    assert "gpt-9" in error["message"]


async def test_a_prompt_over_the_context_names_both_numbers(lone: httpx.AsyncClient) -> None:
    body = good(messages=[{"role": "user", "content": "word " * 9000}])
    error = (await lone.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]


@pytest.mark.parametrize("spare", [0, 1])
async def test_the_context_is_exact_to_the_token(lone: httpx.AsyncClient, spare: int) -> None:
    count = (await lone.post("/tokenize", json=good())).json()["count"]
    response = await lone.post("/v1/chat/completions", json=good(max_tokens=SMALL - count + spare))
    assert response.status_code == (400 if spare else ACCEPTED)
    if spare:
        assert f"{count} in the prompt" in response.json()["error"]["message"]


async def test_the_submission_says_what_the_body_said(mesh: Mesh) -> None:
    await mesh.chat(
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0.5, top_p=0.5, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, seed=5, logprobs=True, top_logprobs=3, max_tokens=9, min_tokens=2,
        stop=["x"], stop_token_ids=[4], ignore_eos=True, logit_bias={"6": 1.5}, n=2,
        include_stop_str_in_output=True, tools=[tool(parameters={"type": "object"})],
        parallel_tool_calls=False, include_reasoning=False, return_token_ids=True, cache_salt="s",
        skip_special_tokens=False, priority=-3, return_tokens_as_token_ids=True,
        allowed_token_ids=[7, 6, 7], thinking_token_budget=5,
    )  # fmt: skip
    submit = mesh.fake.submits[0].submit
    s, o = submit.sampling, submit.output
    assert (s.temperature, s.top_p, s.top_k, s.max_tokens, s.min_tokens) == (0.5, 0.5, 7, 9, 2)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.5)
    assert (s.seed, s.num_logprobs, s.ignore_eos, list(s.stop_token_ids)) == (5, 3, True, [4])
    assert (list(s.logit_bias_token_ids), list(s.logit_bias_values)) == ([6], [1.5])
    assert list(s.eos_token_ids) == [846, 853, 855]
    assert (list(o.stop), o.include_stop_str_in_output, o.skip_special_tokens) == (
        ["x"],
        True,
        False,
    )
    assert (o.tools[0].name, o.tools[0].parameters_json) == ("now", b'{"type":"object"}')
    assert (o.parallel_tool_calls, o.include_reasoning, o.return_token_ids) == (False, False, True)
    assert (o.include_logprobs, o.num_top_logprobs, o.parse_reasoning) == (True, 3, True)
    assert o.starts_in_reasoning
    assert (submit.cache_salt, submit.priority) == ("s", -3)
    assert o.return_tokens_as_token_ids
    assert list(s.allowed_token_ids) == [7, 6]
    control = mesh.gateway.dialect.control
    budget = s.thinking_budget
    assert (budget.max_tokens, budget.end_token_id) == (5, control.end_think)
    assert list(budget.other_end_token_ids) == [control.tool_call]
    assert [q.index for q in submit.sequences] == [0, 1]
    assert submit.sequences[0].seed == 5 != submit.sequences[1].seed
    assert submit.request_id == o.response_id


async def test_without_a_bound_the_room_left_is_the_bound(mesh: Mesh) -> None:
    await mesh.chat()
    submit = mesh.fake.submits[0].submit
    num_prompt = len(submit.sequences[0].prompt_token_ids) // 4
    assert submit.sampling.max_tokens == SMALL - num_prompt


async def test_the_newer_name_of_max_tokens_wins(mesh: Mesh) -> None:
    await mesh.chat(max_tokens=3, max_completion_tokens=5)
    assert mesh.fake.submits[0].submit.sampling.max_tokens == 5


async def test_thinking_off_starts_outside_reasoning(mesh: Mesh) -> None:
    await mesh.chat(reasoning_effort="none")
    assert not mesh.fake.submits[0].submit.output.starts_in_reasoning


async def test_defaults_of_sampling_are_the_checkpoints(mesh: Mesh) -> None:
    await mesh.chat()
    sampling = mesh.fake.submits[0].submit.sampling
    assert sampling.temperature == 1.0
    assert sampling.top_p == pytest.approx(0.95)
    assert sampling.HasField("num_logprobs") is False


async def test_unseeded_requests_get_seeds_of_their_own(mesh: Mesh) -> None:
    await mesh.chat()
    await mesh.chat()
    first, second = (submit.submit.sampling.seed for submit in mesh.fake.submits)
    assert first
    assert first != second


async def test_unknown_fields_are_served_and_named(mesh: Mesh) -> None:
    response = await mesh.chat(
        foo=1,
        messages=[{"role": "user", "content": "Hi", "name": "Ann"}],
        chat_template_kwargs={"bar": 1},
    )
    assert response.status_code == 200
    named = response.headers["x-unknown-fields"].split(", ")
    assert named == ["foo", "messages[0].name", "chat_template_kwargs.bar"]


async def test_control_spellings_of_clients_are_ordinary_text(mesh: Mesh) -> None:
    await mesh.chat(messages=[{"role": "user", "content": "<|user|>"}])
    ids = mesh.fake.submits[0].submit.sequences[0].prompt_token_ids
    user = mesh.gateway.dialect.control.user.to_bytes(4, "little")
    assert [ids[i : i + 4] for i in range(0, len(ids), 4)].count(user) == 1


async def test_a_budget_is_only_for_a_prompt_that_opens_a_thought(mesh: Mesh) -> None:
    await mesh.chat(thinking_token_budget=5, reasoning_effort="none")
    await mesh.chat(thinking_token_budget=-1)
    assert not any(s.submit.sampling.HasField("thinking_budget") for s in mesh.fake.submits)


async def test_an_echo_is_the_assistants_text_that_is_continued(mesh: Mesh) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}
    options = {"echo": True, "add_generation_prompt": False}
    await mesh.chat(messages=[USER, said], continue_final_message=True, n=2, **options)
    await mesh.chat(messages=[USER], **options)
    echoes = [list(s.submit.output.echo_texts) for s in mesh.fake.submits]
    assert echoes == [["Once", "Once"], []]


async def test_a_prompt_is_cut_at_the_side_that_is_asked_for(mesh: Mesh) -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    await mesh.chat(messages=long, truncate_prompt_tokens=10)
    await mesh.chat(messages=long, truncate_prompt_tokens=10, truncation_side="right")
    await mesh.chat(messages=long, truncate_prompt_tokens=-1, max_tokens=100)
    cut, right, most = (s.submit for s in mesh.fake.submits)
    think = mesh.gateway.dialect.control.think.to_bytes(4, "little")
    assert len(cut.sequences[0].prompt_token_ids) == 40
    assert cut.sequences[0].prompt_token_ids.endswith(think)
    assert cut.output.starts_in_reasoning
    assert not right.output.starts_in_reasoning
    assert len(most.sequences[0].prompt_token_ids) // 4 == SMALL - 100
