"""The Messages API with the official SDK, whole mesh: thinking, tools, streams, errors."""

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.e2e.mesh import Mesh, replay

TOOL: Any = {
    "name": "get_time",
    "description": "The time in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
USER: Any = {"role": "user", "content": "Time?"}
MARKUP = (
    "Look it up.</think>One moment.<tool_call>get_time"
    "<arg_key>city</arg_key><arg_value>Köln 🌧</arg_value></tool_call>"
    "<tool_call>get_time</tool_call>"
)
OPTIONS: Any = {"model": "glm-nano", "max_tokens": 200, "tools": [TOOL]}


@pytest.fixture
def client(replayed: Mesh) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=replayed.url, api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.mark.parametrize("steps", [(1,), (7,), (1000,)])
def test_a_stream_joins_to_the_whole_message(
    client: anthropic.Anthropic, steps: tuple[int, ...]
) -> None:
    whole = client.messages.create(**OPTIONS, messages=[USER], extra_body=replay(MARKUP))
    with client.messages.stream(
        **OPTIONS, messages=[USER], extra_body=replay(MARKUP, steps)
    ) as stream:
        joined = stream.get_final_message()
    for message in (whole, joined):
        thinking, text, call, bare = message.content
        assert thinking.type == "thinking"
        assert (thinking.thinking, text.type) == ("Look it up.", "text")
        assert call.type == bare.type == "tool_use"
        assert (call.name, call.input, bare.input) == ("get_time", {"city": "Köln 🌧"}, {})
        assert message.stop_reason == "tool_use"
    assert whole.usage.output_tokens == joined.usage.output_tokens


def test_a_loop_of_tool_calls_goes_on(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**OPTIONS, messages=[USER], extra_body=replay(MARKUP))
    uses = [block for block in first.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12:00"} for block in uses
    ]
    turns: Any = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    counted = client.messages.count_tokens(model="glm-nano", tools=[TOOL], messages=turns)
    last = client.messages.create(**OPTIONS, messages=turns, extra_body=replay("</think>Noon"))
    assert last.content[-1].type == "text"
    assert last.content[-1].text == "Noon"
    usage = last.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("text", "options", "reason", "sequence"),
    [
        ("</think>a b", {}, "end_turn", None),
        ("</think>a b", {"stop_sequences": [" b"]}, "stop_sequence", " b"),
        ("</think>a b c d", {"max_tokens": 2}, "max_tokens", None),
    ],
)
def test_why_a_message_ended_is_told(
    client: anthropic.Anthropic, text: str, options: Any, reason: str, sequence: str | None
) -> None:
    message = client.messages.create(
        **{**OPTIONS, **options}, messages=[USER], extra_body=replay(text)
    )
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_a_prompt_over_the_context_says_so_in_known_words(client: anthropic.Anthropic) -> None:
    long: Any = {"role": "user", "content": "word " * 9000}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**OPTIONS, messages=[long], extra_body=replay("x"))


async def test_the_asynchronous_sdk_reads_the_same(replayed: Mesh) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=replayed.url, api_key="none") as client,
        client.messages.stream(**OPTIONS, messages=[USER], extra_body=replay(MARKUP)) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in final.content] == [
        *("thinking", "text", "tool_use", "tool_use"),
    ]


def test_the_model_itself_answers_within_its_budget_of_thinking(nano: Mesh) -> None:
    with anthropic.Anthropic(base_url=nano.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="glm-nano",
            max_tokens=40,
            extra_body={"temperature": 0},
            thinking={"type": "enabled", "budget_tokens": 3},
            messages=[{"role": "user", "content": "What is 2 plus 3?"}],
        )
    kinds = [block.type for block in message.content]
    assert kinds[-1] == "text", "the thought was ended, and an answer came"
    chat = nano.client().chat.completions.create(
        model="glm-nano",
        max_tokens=40,
        temperature=0,
        messages=[{"role": "user", "content": "What is 2 plus 3?"}],
        extra_body={"thinking_token_budget": 3},
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert (chat.usage.completion_tokens_details.reasoning_tokens or 0) <= 3


class Person(BaseModel):
    """Short whatever the model says."""

    name: Literal["Ann", "Bob"]
    is_old: bool


def test_a_form_and_a_forced_tool_are_kept_to(nano: Mesh) -> None:
    options: Any = {"model": "glm-nano", "max_tokens": 200, "messages": [USER]}
    with anthropic.Anthropic(base_url=nano.url, api_key="none", max_retries=0) as client:
        parsed = client.messages.parse(
            **options, thinking={"type": "disabled"}, output_format=Person
        )
        forced = client.messages.create(
            **options, tools=[TOOL], tool_choice={"type": "tool", "name": "get_time"}
        )
    assert isinstance(parsed.parsed_output, Person)
    assert forced.stop_reason == "tool_use"
    assert [b.name for b in forced.content if b.type == "tool_use"] == ["get_time"]
