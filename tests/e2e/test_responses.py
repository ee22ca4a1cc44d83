"""The Responses API with the official SDK, whole mesh: streamed, kept, gone on from."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.mesh import Mesh, replay

TOOL: Any = {
    "type": "function",
    "name": "get_time",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
MARKUP = (
    "Look it up.</think>One moment.<tool_call>get_time"
    "<arg_key>city</arg_key><arg_value>Köln 🌧</arg_value></tool_call>"
)


@pytest.mark.parametrize("steps", [(1,), (7,), (1000,)])
def test_a_stream_ends_with_what_a_whole_response_is(
    replayed: Mesh, steps: tuple[int, ...]
) -> None:
    client = replayed.client()
    options: Any = {"model": "glm-nano", "input": "Hi", "tools": [TOOL]}
    whole = client.responses.create(**options, extra_body=replay(MARKUP))
    with client.responses.stream(**options, extra_body=replay(MARKUP, steps)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    for response in (whole, final):
        reasoning, message, call = response.output
        assert (reasoning.type, message.type, call.type) == (
            "reasoning",
            "message",
            "function_call",
        )
        assert reasoning.type == "reasoning"
        assert reasoning.content
        assert reasoning.content[0].text == "Look it up."
        assert response.output_text == "One moment."
        assert call.type == "function_call"
        assert call.arguments == '{"city": "Köln 🌧"}'
    assert whole.usage == final.usage


def test_a_loop_of_tool_calls_goes_on_from_what_is_kept_or_from_what_is_sent(
    replayed: Mesh,
) -> None:
    client = replayed.client()
    options: Any = {"model": "glm-nano", "tools": [TOOL]}
    first = client.responses.create(**options, input="Time?", extra_body=replay(MARKUP))
    call = first.output[-1]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    kept = client.responses.create(
        **options, previous_response_id=first.id, input=[output], extra_body=replay("</think>Noon")
    )
    history: Any = [{"role": "user", "content": "Time?"}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    sent = client.responses.create(
        **options, input=[*history, output], store=False, extra_body=replay("</think>Noon")
    )
    assert kept.output_text == sent.output_text == "Noon"
    assert kept.usage is not None
    assert sent.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(sent.id)


def test_sealed_reasoning_is_what_the_model_sees_again(replayed: Mesh) -> None:
    client = replayed.client()
    options: Any = {"model": "glm-nano", "tools": [TOOL], "store": False}
    first = client.responses.create(
        **options,
        input="Time?",
        include=["reasoning.encrypted_content"],
        extra_body=replay(MARKUP),
    )
    dumped: Any = [item.model_dump(exclude_none=True) for item in first.output]
    bare = [{k: v for k, v in item.items() if k not in ("content", "summary")} for item in dumped]
    answer = {"type": "function_call_output", "call_id": dumped[-1]["call_id"], "output": "12"}
    counts = []
    for reasoning in (dumped[0], {**bare[0], "summary": []}):
        items: Any = [{"role": "user", "content": "Time?"}, reasoning, *dumped[1:], answer]
        made = client.responses.create(**options, input=items, extra_body=replay("</think>x"))
        assert made.usage is not None
        counts.append(made.usage.input_tokens)
    assert counts[0] == counts[1]


def test_an_answer_that_was_cut_is_incomplete(replayed: Mesh) -> None:
    made = replayed.client().responses.create(
        model="glm-nano", input="Hi", max_output_tokens=3, extra_body=replay("</think>abcdef")
    )
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


async def test_the_asynchronous_sdk_reads_the_same(replayed: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{replayed.url}/v1", api_key="none") as client:
        stream = await client.responses.create(
            model="glm-nano", input="Hi", stream=True, extra_body=replay("</think>Hello")
        )
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "Hello"
        made = await client.responses.create(
            model="glm-nano", input="Hi", background=True, extra_body=replay("</think>Later")
        )
        async with asyncio.timeout(60):
            while made.status == "in_progress":
                await asyncio.sleep(0.05)
                made = await client.responses.retrieve(made.id)
        assert made.output_text == "Later"


def test_the_model_itself_answers(nano: Mesh) -> None:
    made = nano.client().responses.create(
        model="glm-nano", input="What is 2 plus 3?", temperature=0, max_output_tokens=60
    )
    assert made.output[0].type == "reasoning"
    assert made.usage is not None
    assert made.usage.output_tokens > 0


class Person(BaseModel):
    """Short whatever the model says."""

    name: Literal["Ann", "Bob"]
    is_old: bool


def test_an_answer_in_a_form_is_parsed_by_the_sdk(nano: Mesh) -> None:
    made = nano.client().responses.parse(
        model="glm-nano",
        input="Who?",
        text_format=Person,
        max_output_tokens=100,
        reasoning={"effort": "none"},
    )
    assert isinstance(made.output_parsed, Person)


def test_a_call_that_is_required_is_made(nano: Mesh) -> None:
    made = nano.client().responses.create(
        model="glm-nano",
        input="Hi",
        tools=[TOOL],
        tool_choice="required",
        max_output_tokens=200,
        temperature=0,
        extra_body={"thinking_token_budget": 5},
    )
    assert made.output[-1].type == "function_call"
    assert made.output[-1].name == "get_time"
