"""Structured output and demanded tool calls through the whole mesh, with the official client."""

import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.mesh import Mesh

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Oslo", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
ASK = "Write JSON with name Bob, age 42, city Oslo."


def ask(mesh: Mesh, text: str, **options: Any) -> Any:
    given = {"max_tokens": 300, "temperature": 0} | options
    return mesh.client().chat.completions.create(
        model="glm-nano", messages=[{"role": "user", "content": text}], **given
    )


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "city"]
        and 0 <= value["age"] <= 150
        and len(value["name"]) <= 12
        and value["city"] in ("Oslo", "Rome")
    )


@pytest.mark.parametrize("extra", [{}, NO_THINKING])
def test_the_answer_is_the_object_behind_the_thinking(nano: Mesh, extra: Any) -> None:
    answer = ask(nano, ASK, response_format=FORMAT, extra_body=extra).choices[0]
    assert json.loads(answer.message.content) == {"name": "Bob", "age": 42, "city": "Oslo"}
    assert answer.finish_reason == "stop"
    assert bool(answer.message.reasoning) is not bool(extra)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_asked_the_schema_is_followed(nano: Mesh, seed: int) -> None:
    answer = ask(nano, "What is 47 + 85?", response_format=FORMAT, n=4, seed=seed, temperature=1.5)
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            assert is_person(choice.message.content)
    assert any(choice.finish_reason == "stop" for choice in answer.choices)


def test_a_stream_adds_up_to_the_object(nano: Mesh) -> None:
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(nano, ASK, response_format=FORMAT, stream=True)
        if chunk.choices
    ]
    assert len(pieces) > 5
    assert is_person("".join(pieces))


def test_the_parse_helper_of_the_sdk_gets_its_model(nano: Mesh) -> None:
    class Person(BaseModel):
        name: str
        age: int
        city: Literal["Oslo", "Rome"]

    answer = nano.client().chat.completions.parse(
        model="glm-nano",
        messages=[{"role": "user", "content": ASK}],
        response_format=Person,
        max_tokens=300,
        temperature=0,
    )
    assert answer.choices[0].message.parsed == Person(name="Bob", age=42, city="Oslo")


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, r"yes|no"),
        ({"structured_outputs": {"regex": "[a-f]{4}"}}, r"[a-f]{4}"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, r"x[0-9]y"),
        ({"guided_choice": ["left", "right"]}, r"left|right"),
        ({"guided_json": {"type": "boolean"}}, r"true|false"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "format": {
                            "type": "tag",
                            "begin": "<b>",
                            "content": {"type": "regex", "pattern": "[0-9]{2}"},
                            "end": "</b>",
                        }
                    }
                }
            },
            r"<b>[0-9]{2}</b>",
        ),
    ],
)
def test_every_kind_of_form_holds_for_chats_and_completions(
    nano: Mesh, body: dict[str, Any], pattern: str
) -> None:
    chat = ask(nano, "What is 1 + 1?", extra_body=body).choices[0]
    assert re.fullmatch(pattern, chat.message.content)
    text = nano.client().completions.create(
        model="glm-nano", prompt="Hi", max_tokens=40, temperature=1, extra_body=body
    )
    assert re.fullmatch(pattern, text.choices[0].text)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"tool_choice": "required"}, {"get_weather", "get_time"}),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, {"get_time"}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                    },
                }
            },
            {"get_weather"},
        ),
    ],
)
@pytest.mark.parametrize("text", ["What is the weather in Oslo?", "What is 47 + 85?"])
def test_a_demanded_call_comes_whatever_is_asked(
    nano: Mesh, options: dict[str, Any], names: set[str], text: str
) -> None:
    choice = ask(nano, text, tools=[WEATHER, TIME], **options).choices[0]
    calls = choice.message.tool_calls
    assert calls
    assert {call.function.name for call in calls} <= names
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert set(arguments) <= {"city", "days"}
        assert call.function.name == "get_time" or isinstance(arguments["city"], str)
    is_named = options["tool_choice"] != "required" and "function" in options["tool_choice"]
    assert choice.finish_reason == ("stop" if is_named else "tool_calls")
    assert not choice.message.content


def test_a_demanded_call_is_streamed_name_first(nano: Mesh) -> None:
    chunks = ask(
        nano,
        "What is the weather in Oslo?",
        tools=[WEATHER, TIME],
        tool_choice="required",
        stream=True,
    )
    deltas = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert deltas[0].function.name == "get_weather"
    joined = "".join(delta.function.arguments or "" for delta in deltas)
    assert json.loads(joined) == {"city": "Oslo"}
    assert len(deltas) > 3, "a string comes as it is written"


def test_one_call_at_most_where_parallel_calls_are_off(nano: Mesh) -> None:
    text = "What is the weather in Oslo and in Rome?"
    both = ask(nano, text, tools=[WEATHER], tool_choice="required").choices[0].message
    assert len(both.tool_calls) >= 1
    one = ask(
        nano, text, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert len(one.message.tool_calls) == 1
    assert one.finish_reason == "tool_calls"


def test_tools_that_are_not_allowed_are_not_called(nano: Mesh) -> None:
    only_time = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "get_time"}}],
        },
    }
    message = (
        ask(nano, "What is the weather in Oslo?", tools=[WEATHER, TIME], tool_choice=only_time)
        .choices[0]
        .message
    )
    assert {call.function.name for call in message.tool_calls or ()} <= {"get_time"}


def test_a_format_beside_tools_leaves_the_choice_to_the_model(nano: Mesh) -> None:
    options = {"tools": [WEATHER], "response_format": FORMAT}
    called = ask(nano, "What is the weather in Oslo?", **options).choices[0]
    assert called.finish_reason == "tool_calls"
    for seed in range(4):
        message = ask(nano, ASK, seed=seed, temperature=1, **options).choices[0].message
        # glm-nano calls where it is given tools; either is right, nothing else is.
        assert message.tool_calls or is_person(message.content)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "foo"}},
                }
            },
            "response_format",
            "foo",
        ),
        (
            {"structured_outputs": {"grammar": "start: missing"}},
            "structured_outputs",
            "missing",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"properties": {"x": {"type": "string", "format": "?"}}},
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
            "tool f, argument x",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_bad_schema_is_a_400_with_the_reason_also_for_streams(
    nano: Mesh, body: dict[str, Any], param: str, text: str, is_stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        ask(nano, "x", extra_body=body, stream=is_stream)
    assert caught.value.param == param


def test_responses_have_forms_and_demanded_calls_too(nano: Mesh) -> None:
    client = nano.client()
    given: dict[str, Any] = {"model": "glm-nano", "max_output_tokens": 300, "temperature": 0}
    form: Any = {"format": {"type": "json_schema", **FORMAT["json_schema"]}}
    assert is_person(client.responses.create(input=ASK, text=form, **given).output_text)
    tool: Any = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(
        input="What is 1 + 1?", tools=[tool], tool_choice="required", **given
    )
    assert [item.type for item in called.output if item.type != "reasoning"] == ["function_call"]
    bad: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "foo"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x", text=bad, **given)
    assert caught.value.param == "text.format"


def test_messages_have_forms_and_demanded_calls_too(nano: Mesh) -> None:
    def post(**fields: Any) -> Any:
        body = {"model": "glm-nano", "max_tokens": 300, "temperature": 0, **fields}
        return httpx.post(f"{nano.url}/v1/messages", json=body, timeout=60)

    ask_weather = [{"role": "user", "content": "What is 1 + 1?"}]
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        content = post(messages=ask_weather, tools=[tool], tool_choice=choice).json()["content"]
        assert content[-1]["type"] == "tool_use"
        assert isinstance(content[-1]["input"]["city"], str)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    written = post(messages=[{"role": "user", "content": ASK}], output_config=form).json()
    assert is_person(written["content"][-1]["text"])
    bad = {"format": {"type": "json_schema", "schema": {"type": "foo"}}}
    refused = post(messages=ask_weather, output_config=bad)
    assert refused.status_code == 400
    assert "output_config.format" in refused.json()["error"]["message"]


def test_ids_are_generated_under_a_form(nano: Mesh) -> None:
    def post(pattern: str) -> Any:
        params = {"max_tokens": 9, "structured_outputs": {"regex": pattern}}
        body = {"token_ids": [1, 2, 3], "sampling_params": params, "output_mode": "text"}
        return httpx.post(f"{nano.url}/inference/v1/generate", json=body, timeout=60)

    assert re.fullmatch("[a-c]{3}", post("[a-c]{3}").json()["choices"][0]["text"])
    refused = post("(").json()["error"]
    assert refused["param"] == "sampling_params.structured_outputs"


def test_a_rendered_request_keeps_its_form_and_cannot_keep_demanded_calls(nano: Mesh) -> None:
    def post(**fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        return httpx.post(f"{nano.url}/v1/chat/completions/render", json=body, timeout=60)

    assert post(guided_regex="a").json()["sampling_params"]["guided_regex"] == "a"
    assert post(tools=[TIME], tool_choice="required").status_code == 400


def test_hostile_schemas_harm_nobody(nano: Mesh) -> None:
    pid = nano.pid("worker")
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}
    for hostile in (
        {"guided_json": wide},
        {"guided_regex": "((a|b|c){1,300}){1,300}x" * 20},
        {"guided_grammar": "start: start start | start?"},
    ):
        code = httpx.post(
            f"{nano.url}/v1/completions",
            json={"prompt": "x", "max_tokens": 5, **hostile},
            timeout=60,
        ).status_code
        assert code in (200, 400, 503)
    assert ask(nano, "What is 1 + 1?").choices[0].message.content
    assert nano.pid("worker") == pid


def test_what_constraints_cost_is_counted(nano: Mesh) -> None:
    masks = nano.metric("glm_mesh:constraint_masks_total")
    ask(nano, ASK, response_format=FORMAT, extra_body=NO_THINKING)
    nano.until(
        lambda: nano.metric("glm_mesh:constraint_masks_total") > masks, 10, "masks are counted"
    )
    assert nano.metric("glm_mesh:constraints_total") > 0
    assert nano.metric("glm_mesh:constraint_prepare_seconds_total") > 0
    assert nano.metric("glm_mesh:constraint_mask_seconds_total") > 0


def test_a_replay_cannot_be_constrained_and_says_so(replayed: Mesh) -> None:
    with pytest.raises(openai.ConflictError, match="replays scripts"):
        ask(
            replayed,
            "x",
            response_format={"type": "json_object"},
            extra_body={"replay": {"text": "x"}},
        )
