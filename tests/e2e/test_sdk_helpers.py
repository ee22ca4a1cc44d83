"""What the official SDKs offer beyond plain requests: stream helpers, parsing, tool runners."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import beta_async_tool, beta_tool
from pydantic import BaseModel

from tests.e2e.mesh import Mesh, replay

USER: Any = {"role": "user", "content": "Time?"}
MARKUP = (
    "Look it up.</think>One moment.<tool_call>get_forecast"
    "<arg_key>city</arg_key><arg_value>Köln 🌧</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_time</tool_call>"
)
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_forecast",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
CALLS = [("get_forecast", '{"city": "Köln 🌧", "days": 3}'), ("get_time", "{}")]
CHAT: Any = {"model": "glm-nano", "messages": [USER], "tools": TOOLS}


class Forecast(BaseModel):
    """Arguments of a call."""

    city: str
    days: int


class Person(BaseModel):
    """Short whatever the model says."""

    name: Literal["Ann", "Bob"]
    is_old: bool


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]


@pytest.mark.parametrize("steps", [(1,), (7,), (1000,)])
def test_the_stream_helper_puts_choices_together(replayed: Mesh, steps: tuple[int, ...]) -> None:
    options: Any = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    whole = replayed.client().chat.completions.create(
        **CHAT, n=2, logprobs=True, extra_body=replay(MARKUP)
    )
    with replayed.client().chat.completions.stream(
        **CHAT, **options, extra_body=replay(MARKUP, steps)
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 4
    for joined, choice in zip(final.choices, whole.choices, strict=True):
        assert calls_of(joined) == calls_of(choice) == CALLS
        assert joined.message.content == choice.message.content == "One moment."
        assert joined.finish_reason == choice.finish_reason == "tool_calls"
        assert joined.logprobs == choice.logprobs
    assert final.usage == whole.usage


async def test_the_asynchronous_stream_helper_does_as_well(replayed: Mesh) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{replayed.url}/v1", api_key="none") as client,
        client.chat.completions.stream(**CHAT, extra_body=replay(MARKUP, (3,))) as stream,
    ):
        text = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(text) == "One moment."
    assert calls_of(final.choices[0]) == CALLS


def test_arguments_are_parsed_into_the_model_that_declared_them(replayed: Mesh) -> None:
    tool = openai.pydantic_function_tool(Forecast, name="get_forecast")
    parsed = replayed.client().chat.completions.parse(
        **{**CHAT, "tools": [tool]}, extra_body=replay(MARKUP)
    )
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Forecast(city="Köln 🌧", days=3)


def test_an_answer_that_is_too_long_raises_the_helpers_own_error(replayed: Mesh) -> None:
    with (
        replayed.client().chat.completions.stream(
            **CHAT, max_tokens=20, extra_body=replay(MARKUP)
        ) as stream,
        pytest.raises(openai.LengthFinishReasonError),
    ):
        stream.get_final_completion()


def test_raw_and_unread_answers_carry_the_request_id(replayed: Mesh) -> None:
    completions = replayed.client().chat.completions
    headers = {"x-request-id": "label-7"}
    raw = completions.with_raw_response.create(
        **CHAT, extra_headers=headers, extra_body=replay("a")
    )
    assert raw.request_id == raw.parse()._request_id == "label-7"
    with completions.with_streaming_response.create(
        **CHAT, stream=True, extra_headers=headers, extra_body=replay("a")
    ) as answer:
        assert answer.request_id == "label-7"
        assert list(answer.iter_lines())[-2] == "data: [DONE]"


async def test_the_asynchronous_sdk_parses_a_form(nano: Mesh) -> None:
    plain: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    async with openai.AsyncOpenAI(base_url=f"{nano.url}/v1", api_key="none") as client:
        chat, response = await asyncio.gather(
            client.chat.completions.parse(
                model="glm-nano", messages=[USER], response_format=Person, extra_body=plain
            ),
            client.responses.parse(
                model="glm-nano", input="Who?", text_format=Person, reasoning={"effort": "none"}
            ),
        )
    assert isinstance(chat.choices[0].message.parsed, Person)
    assert isinstance(response.output_parsed, Person)


async def test_a_form_is_parsed_as_it_streams(nano: Mesh) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{nano.url}/v1", api_key="none") as client,
        client.responses.stream(
            model="glm-nano", input="Who?", text_format=Person, reasoning={"effort": "none"}
        ) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert isinstance(final.output_parsed, Person)


async def test_responses_stream_calls_to_the_asynchronous_sdk(replayed: Mesh) -> None:
    tools: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    tools[1]["parameters"] = {"type": "object", "properties": {}}
    async with (
        openai.AsyncOpenAI(base_url=f"{replayed.url}/v1", api_key="none") as client,
        client.responses.stream(
            model="glm-nano", input="Hi", tools=tools, extra_body=replay(MARKUP, (2,))
        ) as stream,
    ):
        done = [e async for e in stream if e.type == "response.function_call_arguments.done"]
        final = await stream.get_final_response()
    assert [event.arguments for event in done] == [arguments for _, arguments in CALLS]
    assert [item.type for item in final.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]


@pytest.fixture
def client(nano: Mesh) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=nano.url, api_key="none", max_retries=0) as sdk:
        yield sdk


ASK: Any = {
    "model": "glm-nano",
    "max_tokens": 96,
    "messages": [{"role": "user", "content": "What is the weather in Marlow?"}],
    "extra_body": {"temperature": 0},
}


def test_a_tool_runner_goes_on_to_the_answer(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(**ASK, tools=[get_weather], max_iterations=4)
    messages = list(runner)
    assert asked == ["Marlow"]
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert "sunny" in messages[-1].content[-1].text  # type: ignore[union-attr]  # a text block


async def test_the_asynchronous_tool_runner_streams_it(nano: Mesh) -> None:
    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: Its name.
        """
        return f"sunny in {city}"

    async with anthropic.AsyncAnthropic(base_url=nano.url, api_key="none") as sdk:
        runner = sdk.beta.messages.tool_runner(
            **ASK, tools=[get_weather], max_iterations=4, stream=True
        )
        reasons = [(await stream.get_final_message()).stop_reason async for stream in runner]
    assert reasons == ["tool_use", "end_turn"]


def test_a_message_streams_its_text_and_its_input(replayed: Mesh) -> None:
    tools: Any = [{"name": "get_forecast", "input_schema": {"properties": PROPERTIES}}]
    with (
        anthropic.Anthropic(base_url=replayed.url, api_key="none") as sdk,
        sdk.messages.stream(
            model="glm-nano",
            max_tokens=200,
            messages=[USER],
            tools=tools,
            extra_body=replay(MARKUP, (2,)),
        ) as stream,
    ):
        inputs = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(inputs)) == {"city": "Köln 🌧", "days": 3}
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("room", [12, 25, 40, 200])
def test_little_room_in_the_context_breaks_no_call(replayed: Mesh, room: int) -> None:
    """The prompt leaves `room` tokens; a call is whole or not there, in both modes."""
    completions = replayed.client().chat.completions
    full: Any = {**CHAT, "messages": [{"role": "user", "content": "Time?" + " a" * 9000}]}
    body = {**replay(MARKUP), "truncate_prompt_tokens": 8192 - room}
    whole = completions.create(**full, extra_body=body)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 8192 - room
    choice = whole.choices[0]
    assert choice.finish_reason == ("tool_calls" if room == 200 else "length")
    assert calls_of(choice) == CALLS[: len(calls_of(choice))]
    stream = completions.create(**full, stream=True, extra_body=body)
    reasons = [c.finish_reason for chunk in stream for c in chunk.choices if c.finish_reason]
    assert reasons == [choice.finish_reason]
