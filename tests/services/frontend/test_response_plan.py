"""What a responses body may say, and the submission it becomes."""

import json
from typing import Any

import httpx
import pytest

from protos.glm.v1 import detokenizer_pb2
from services.frontend.response_plan import chat_tool_choice, response_format_of
from tests.services.frontend.conftest import NAME, Mesh

ACCEPTED = 503
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12"}

REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "invalid_type"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": []}, "input", "empty_array"),
    ({"input": ["Hi"]}, "input[0]", "invalid_type"),
    ({"input": [{"content": "Hi"}]}, "input[0].role", "missing_required_parameter"),
    ({"input": [{**USER, "role": "tool"}]}, "input[0].role", "invalid_value"),
    ({"input": [{**USER, "content": []}]}, "input[0].content", "empty_array"),
    (
        {"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "unsupported_value"),
    ({"input": [{"type": "function_call"}]}, "input[0].call_id", "missing_required_parameter"),
    ({"input": [USER, OUTPUT]}, "input[1]", "invalid_value"),
    ({"input": [USER, CALL]}, "input[1]", "invalid_value"),
    ({"input": [USER, CALL, {**OUTPUT, "call_id": "c2"}]}, "input[2].call_id", "invalid_value"),
    ({"input": "word " * 9000}, "input", "context_length_exceeded"),
    ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
    ({"max_output_tokens": 8192}, "input", "context_length_exceeded"),
    ({"temperature": 3}, "temperature", "decimal_above_max_value"),
    ({"reasoning": {"effort": "odd"}}, "reasoning.effort", "invalid_value"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_value"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_value"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"include": ["web_search_call.results"]}, "include", "unsupported_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_value",
    ),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"background": True, "stream": True}, "background", "unsupported_value"),
    ({"truncation": "odd"}, "truncation", "invalid_value"),
    ({"conversation": "c"}, "conversation", "unsupported_value"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_value"),
]
TAKEN: list[dict[str, Any]] = [
    {},
    {"input": [USER, {"role": "assistant", "content": "a"}, USER]},
    {"input": [USER, CALL, OUTPUT]},
    {"include": ["reasoning.encrypted_content"], "store": False},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
    {"reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "medium"}},
    {"tools": [], "max_tool_calls": 3, "truncation": "auto", "prompt_cache_key": "k"},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"instructions": "Be brief.", "metadata": {"a": "b"}, "service_tier": "auto"},
]


def good(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": "Hi", **fields}


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_wrong_is_refused_with_its_field(
    lone: httpx.AsyncClient, fields: dict[str, Any], param: str | None, code: str
) -> None:
    response = await lone.post("/v1/responses", json=good(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


@pytest.mark.parametrize("fields", TAKEN, ids=lambda value: str(value)[:60])
async def test_what_is_right_reaches_the_detokenizer(
    lone: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    response = await lone.post("/v1/responses", json=good(**fields))
    assert response.status_code == ACCEPTED, response.text


async def test_an_input_is_required(lone: httpx.AsyncClient) -> None:
    error = (await lone.post("/v1/responses", json={"model": NAME})).json()["error"]
    assert (error["param"], error["code"]) == ("input", "missing_required_parameter")


async def test_the_prompt_is_that_of_the_same_chat(mesh: Mesh) -> None:
    items = [USER, CALL, OUTPUT]
    await mesh.http.post(
        "/v1/responses", json=good(input=items, instructions="Be brief.", tools=[TOOL])
    )
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    await mesh.chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "12"},
        ],
        tools=[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
    )
    one, other = (s.submit.sequences[0].prompt_token_ids for s in mesh.fake.submits)
    assert one == other


async def test_the_submission_says_what_the_body_said(mesh: Mesh) -> None:
    await mesh.http.post(
        "/v1/responses",
        json=good(
            stream=True, max_output_tokens=9, temperature=0.5, top_k=3, stop=["x"], seed=5,
            tools=[TOOL], parallel_tool_calls=False, reasoning={"effort": "none"},
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
            top_logprobs=2, metadata={"a": "b"}, priority=2, thinking_token_budget=4,
        ),
    )  # fmt: skip
    submit = mesh.fake.submits[0].submit
    s, o = submit.sampling, submit.output
    assert (s.max_tokens, s.temperature, s.top_k, s.seed, s.num_logprobs) == (9, 0.5, 3, 5, 2)
    assert (o.object_kind, o.is_stream) == (detokenizer_pb2.OBJECT_KIND_RESPONSE, True)
    assert (o.keep_object, o.include_sealed_reasoning, o.include_logprobs) == (True, True, True)
    assert (list(o.stop), o.parallel_tool_calls, o.starts_in_reasoning) == (["x"], False, False)
    assert o.response_id.startswith("resp_")
    assert o.tools[0].name == "now"
    assert submit.priority == 2
    echo = json.loads(o.echo_json)
    assert echo["metadata"] == {"a": "b"}
    assert (echo["temperature"], echo["max_output_tokens"]) == (0.5, 9)
    assert echo["tools"] == [{**TOOL, "strict": None}]
    assert echo["reasoning"] == {"effort": "none", "summary": None}


async def test_too_long_a_conversation_loses_its_oldest_turns_when_that_is_asked_for(
    mesh: Mesh,
) -> None:
    def turn(i: int) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": f"{i} " + "word " * 300},
            {"role": "assistant", "content": str(i)},
        ]

    items = [item for i in range(20) for item in turn(i)] + [USER]
    body = good(input=items, instructions="Stay.", truncation="auto", max_output_tokens=100)
    assert (await mesh.http.post("/v1/responses", json=body)).status_code == 200
    ids = mesh.fake.submits[0].submit.sequences[0].prompt_token_ids
    text = mesh.gateway.dialect.decode(memoryview(ids).cast("I").tolist())
    assert "Stay." in text
    assert "Hi<|assistant|>" in text
    kept = [i for i in range(20) if f"<|user|>{i} word" in text]
    assert kept == list(range(kept[0], 20))
    assert 0 < kept[0] < 20
    # One more turn would not have fitted.
    num_tokens = len(ids) // 4
    assert num_tokens + 100 + 1.1 * num_tokens / len(kept) > 8192


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("auto", "auto"),
        (
            {"type": "function", "name": "f"},
            {"type": "function", "function": {"name": "f"}},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [TOOL]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "now"}}],
                },
            },
        ),
        ({"type": "odd"}, {"type": "odd"}),
    ],
)
def test_a_tool_choice_is_written_as_in_chats(given: object, made: object) -> None:
    assert chat_tool_choice(given) == made


def test_a_schema_stands_one_level_deeper_in_chats() -> None:
    given = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert response_format_of(given) == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert response_format_of({"type": "text"}) == {"type": "text"}


async def test_unknown_fields_are_served_and_named_wherever_they_stand(mesh: Mesh) -> None:
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "odd": 1}
    said = {"type": "message", "id": "m", "role": "assistant", "content": [part], "foo": None}
    body = good(
        input=[USER, said, {**USER, "bar": 1}],
        tools=[{**TOOL, "baz": 1}],
        reasoning={"effort": "high", "qux": 1},
        quux=1,
    )
    response = await mesh.http.post("/v1/responses", json=body)
    assert response.status_code == 200
    assert response.headers["x-unknown-fields"].split(", ") == [
        *("quux", "reasoning.qux", "tools[0].baz", "input[1].content[0].odd", "input[2].bar"),
    ]


@pytest.mark.parametrize(
    ("choice", "param", "code"),
    [
        ({"type": "allowed_tools", "mode": {}, "tools": []}, "tool_choice.mode", "invalid_type"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": 5},
            "tool_choice.tools",
            "invalid_type",
        ),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": []}]},
            "tool_choice.tools[0].name",
            "invalid_type",
        ),
        ({"type": "function", "name": 5}, "tool_choice.name", "invalid_type"),
        ({"type": "function", "name": "nope"}, "tool_choice.name", "invalid_value"),
    ],
)
async def test_a_tool_choice_that_is_wrong_is_named_as_it_was_written(
    lone: httpx.AsyncClient, choice: dict, param: str, code: str
) -> None:
    tools = [{"type": "function", "name": "now"}]
    body = {"input": "Hi", "tools": tools, "tool_choice": choice}
    response = await lone.post("/v1/responses", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert f"'{param}'" in error["message"]


CHAT_WORDS = ("tool_call", "tool message", "'tool'", "messages[", "json_schema", "allowed_tools'")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [USER, CALL]}, "input[1]"),
        ({"input": [USER, CALL, USER, OUTPUT]}, "input[2]"),
        ({"input": [USER, OUTPUT]}, "input[1]"),
        ({"input": [USER, CALL, {**OUTPUT, "call_id": "c9"}]}, "input[2].call_id"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}},
            "text.format.schema",
        ),
    ],
)
async def test_errors_speak_the_language_of_the_protocol(
    lone: httpx.AsyncClient, fields: dict, param: str
) -> None:
    response = await lone.post("/v1/responses", json={"input": "Hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert not [word for word in CHAT_WORDS if word in error["message"]], error["message"]
