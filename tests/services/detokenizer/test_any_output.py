"""Whatever the model emits and however its tokens arrive, every protocol streams what it would say.

From token ids through choices, presenters and frames to what the official SDKs put together from
them, held against the unstreamed answer to the same tokens in one piece.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from services.detokenizer.build import build_presenter, build_response
from services.detokenizer.delivery import ReaderLimits
from services.detokenizer.events import DeltaEvent, EventWriter, SequenceEndEvent
from services.detokenizer.messages import ObjectKind, ToolChoice
from services.detokenizer.response import Response
from shared.endings import FinishReason
from shared.sampling import TokenLogprobs
from tests.services.detokenizer.frames import CONTEXT, SPECS, events, finished, submit
from tests.services.detokenizer.test_machine import sequences
from tests.services.detokenizer.words import EOS, VOCABULARY, ids

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ECHO = b'"parallel_tool_calls":true,"tool_choice":"auto","tools":[]'
NEWLINE = ord("\n")


@dataclass(frozen=True)
class Arrival:
    """How tokens come: sizes of groups, cycled, and after how many groups somebody reads."""

    groups: tuple[int, ...]
    read_every: int


WHOLE = Arrival((10_000,), 1)
arrivals = st.builds(
    Arrival,
    st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    st.integers(1, 12),
)
# Random pieces seldom make calls, whole or cut at an interesting place.
SEGMENTS = [
    *(
        "Hi",
        "a ",
        " \n",
        "\n\n",
        "\u65e5\u672c",
        "<think>R",
        "R 1 ",
        "</think>",
        "<|user|>",
        "Paris 12",
    ),
    "<tool_call>now</tool_call>",
    "<tool_call>now",
    "<tool_call>nope</tool_call>",
    "<tool_call>some prose",
    "<tool_call>get_weather<arg_key>",
    "<tool_call>get_weather<arg_key></tool_call>",
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>x y\U0001f600",
    "<tool_call>get_weather<arg_key>days</arg_key><arg_value>1",
    "<arg_key>days</arg_key><arg_value>12</arg_value>",
    "</arg_value>",
    "</arg_value></tool_call>",
]
structured = st.lists(st.sampled_from(SEGMENTS), max_size=8).map(lambda parts: ids("".join(parts)))
emitted = st.one_of(sequences, structured, structured).map(tuple)
options = st.fixed_dictionaries(
    {
        "starts_in_reasoning": st.booleans(),
        "include_reasoning": st.sampled_from([True, True, False]),
        "parallel_tool_calls": st.sampled_from([True, True, False]),
        "include_logprobs": st.booleans(),
        "return_token_ids": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "stop": st.sampled_from([(), (), ("a",), ("\n", "x y"), ("Paris", "ris 12")]),
        "tool_choice": st.sampled_from([*ToolChoice, ToolChoice.AUTO]),
    }
)
endings = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, None])


@dataclass(frozen=True)
class Output:
    """What the model emits for each choice, and why it ends; None is a stop id of the client."""

    choices: tuple[tuple[int, ...], ...]
    reason: FinishReason | None

    def tokens(self, index: int) -> list[int]:
        """All tokens of a choice, the ending one included."""
        last = {FinishReason.STOP: [EOS], FinishReason.LENGTH: [], None: [NEWLINE]}
        return [*self.choices[index], *last[self.reason]]


def values_of(token: int) -> TokenLogprobs:
    """Different for each token, so that a mix-up shows."""
    return TokenLogprobs(
        logprob=-token / 7,
        rank=token,
        top_token_ids=(token, 0xE6),
        top_logprobs=(-token / 7, -99.0),
    )


def started(kind: ObjectKind, output: Output, **spec: Any) -> tuple[Any, Response]:
    """A request and its response, before any token."""
    if kind.is_conversation:
        spec = {"tools": SPECS, "tool_choice_name": "now", **spec}
    sampling = {"stop_token_ids": (NEWLINE,) if output.reason is None else ()}
    request = submit(len(output.choices), sampling=sampling, object_kind=kind, **spec)
    return request, build_response(request, CONTEXT, 0.0)


def feed(
    request: Any,
    response: Response,
    output: Output,
    arrival: Arrival,
    read: Callable[[], object],
) -> None:
    """All tokens and ends; `read` is called as the arrival says, and after each end."""
    pending = {choice.index: output.tokens(choice.index) for choice in response.choices}
    number = 0
    while any(pending.values()):
        for choice in response.choices:
            size = arrival.groups[number % len(arrival.groups)]
            left = pending[choice.index]
            tokens, pending[choice.index] = left[:size], left[size:]
            wanted = request.output.include_logprobs
            choice.feed(tokens, [values_of(token) for token in tokens] if wanted else None)
            number += 1
            if number % arrival.read_every == 0:
                read()
    is_stop_id = output.reason is None
    for choice in response.choices:
        stop_token_id = NEWLINE if is_stop_id else None
        choice.finish(finished(output.reason or FinishReason.STOP, stop_token_id=stop_token_id))
        read()


def answer(kind: ObjectKind, output: Output, arrival: Arrival, **spec: Any) -> bytes:
    """Everything a client gets."""
    request, response = started(kind, output, **spec)
    presenter = build_presenter(response, request.output, CONTEXT)
    pieces: list[bytes] = []

    def read() -> None:
        pieces.append(presenter.render(response.choices))

    feed(request, response, output, arrival, read)
    assert presenter.render(response.choices) == b""
    return b"".join(pieces)


def whole(kind: ObjectKind, output: Output, **spec: Any) -> Any:
    return json.loads(answer(kind, output, WHOLE, **spec))


def named_events(data: bytes) -> list[Any]:
    """Events with names, each name that of its document."""
    documents = []
    for part in data.decode().split("\n\n")[:-1]:
        name, text = part.split("\n")
        documents.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {documents[-1]['type']}"
    return documents


def outputs(max_choices: int) -> st.SearchStrategy[Output]:
    return st.builds(
        Output, st.lists(emitted, min_size=1, max_size=max_choices).map(tuple), endings
    )


def calls_of(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call."""
    calls = message.get("tool_calls") or []
    assert all(call["type"] == "function" for call in calls)
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]


def check_calls(calls: Sequence[tuple[str, str, str]], allowed: set[str]) -> None:
    """Complete calls are of tools that may be called, their arguments strict JSON objects."""
    for _, name, arguments in calls:
        assert name in allowed
        assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)


def check_chunks(stream: list[Any], output: Output, *, has_usage: bool) -> None:
    """One end per choice, in its last chunk; one [DONE], last, right behind the usage."""
    assert stream.count("[DONE]") == 1
    assert stream[-1] == "[DONE]"
    with_usage = [chunk for chunk in stream[:-1] if chunk.get("usage")]
    assert with_usage == ([stream[-2]] if has_usage else [])
    assert not has_usage or stream[-2]["choices"] == []
    for index in range(len(output.choices)):
        entries = entries_of(stream, index)
        reasons = [entry["finish_reason"] for entry in entries]
        assert reasons[-1] is not None
        assert not any(reasons[:-1])


def entries_of(stream: list[Any], index: int) -> list[Any]:
    """What the chunks say of one choice."""
    return [c for chunk in stream[:-1] for c in chunk["choices"] if c["index"] == index]


def joined_ids(stream: list[Any], index: int) -> list[int]:
    return [t for entry in entries_of(stream, index) for t in entry.get("token_ids") or []]


@settings(max_examples=80, deadline=None)
@given(outputs(2), arrivals, options)
def test_a_chat_streams_what_it_says(
    output: Output, arrival: Arrival, spec: dict[str, Any]
) -> None:
    kind = ObjectKind.CHAT_COMPLETION
    body = whole(kind, output, **spec)
    stream = events(answer(kind, output, arrival, is_stream=True, include_usage=True, **spec))
    check_chunks(stream, output, has_usage=True)
    state = ChatCompletionStreamState()
    for chunk in stream[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    snapshot = state.current_completion_snapshot.to_dict()
    assert snapshot["usage"] == body["usage"]
    allowed = {"now"} if spec["tool_choice"] is ToolChoice.NAMED else {s.name for s in SPECS}
    if spec["tool_choice"] is ToolChoice.NONE:
        allowed = set()
    for found, expected in zip(snapshot["choices"], body["choices"], strict=True):
        message, right = found["message"], expected["message"]
        assert (message.get("content") or None) == right["content"]
        for name in ("reasoning", "reasoning_content"):
            assert message.get(name) == right[name]
        calls, complete = calls_of(message), calls_of(right)
        check_calls(complete, allowed)
        assert calls[: len(complete)] == complete
        is_cut = output.reason is not FinishReason.STOP or expected["stop_reason"] is not None
        assert len(calls) - len(complete) <= is_cut, "only the last call can be cut"
        last = entries_of(stream, expected["index"])[-1]  # the SDK keeps no stop_reason
        assert found["finish_reason"] == expected["finish_reason"]
        assert last["stop_reason"] == expected["stop_reason"]
        if expected["finish_reason"] == "tool_calls":
            assert complete
        logprobs = (found.get("logprobs") or {}).get("content") or []
        assert logprobs == (expected["logprobs"] or {"content": []})["content"]
        ids = joined_ids(stream, expected["index"])
        assert ids == expected.get("token_ids", [])


@settings(max_examples=60, deadline=None)
@given(outputs(2), arrivals, options)
def test_a_completion_streams_what_it_says(
    output: Output, arrival: Arrival, spec: dict[str, Any]
) -> None:
    kind = ObjectKind.TEXT_COMPLETION
    spec = {k: v for k, v in spec.items() if k not in ("tool_choice", "starts_in_reasoning")}
    spec["include_reasoning"] = True
    body = whole(kind, output, **spec)
    stream = events(answer(kind, output, arrival, is_stream=True, include_usage=True, **spec))
    check_chunks(stream, output, has_usage=True)
    assert stream[-2]["usage"] == body["usage"]
    for expected in body["choices"]:
        index = expected["index"]
        entries = entries_of(stream, index)
        assert "".join(entry["text"] for entry in entries) == expected["text"]
        for name in ("finish_reason", "stop_reason"):
            assert entries[-1][name] == expected[name]
        assert joined_ids(stream, index) == expected.get("token_ids", [])
        for column, right in (expected["logprobs"] or {}).items():
            pieces = [entry["logprobs"][column] for entry in entries if entry["logprobs"]]
            assert [value for piece in pieces for value in piece] == right


@settings(max_examples=60, deadline=None)
@given(outputs(2), arrivals, st.booleans())
def test_tokens_stream_as_they_are(output: Output, arrival: Arrival, has_text: bool) -> None:
    kind, spec = ObjectKind.TOKENS, {"include_logprobs": True, "include_text": has_text}
    body = whole(kind, output, **spec)
    stream = events(answer(kind, output, arrival, is_stream=True, **spec))
    for expected in body["choices"]:
        index = expected["index"]
        assert joined_ids(stream, index) == expected["token_ids"] == output.tokens(index)
        entries = entries_of(stream, index)
        values = [v for entry in entries if entry["logprobs"] for v in entry["logprobs"]["content"]]
        assert values == (expected["logprobs"] or {"content": []})["content"]
        if has_text:
            assert "".join(entry["text"] for entry in entries) == expected["text"]


@settings(max_examples=80, deadline=None)
@given(outputs(1), arrivals, options)
def test_a_response_streams_what_it_says(
    output: Output, arrival: Arrival, spec: dict[str, Any]
) -> None:
    kind = ObjectKind.RESPONSE
    spec = {**spec, "echo_members": ECHO, "return_token_ids": False}
    body = whole(kind, output, **spec)
    stream = named_events(answer(kind, output, arrival, is_stream=True, **spec))
    for number, event in enumerate(stream):
        assert event["sequence_number"] == number
        assert RESPONSE_EVENT.validate_python(event).type == event["type"]
    ended = ("response.completed", "response.incomplete")
    assert [event["type"] for event in stream if event["type"] in ended] == [stream[-1]["type"]]
    assert stream[-1]["response"] == body
    for item in body["output"]:
        if item["type"] == "function_call":
            assert isinstance(json.loads(item["arguments"], parse_constant=pytest.fail), dict)
    deltas: dict[int, str] = {}
    for event in stream:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            deltas[place] = deltas.get(place, "") + event["delta"]
    for place, item in enumerate(body["output"]):
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas.get(place, "") == text


@settings(max_examples=80, deadline=None)
@given(outputs(1), arrivals, options)
def test_a_message_streams_what_it_says(
    output: Output, arrival: Arrival, spec: dict[str, Any]
) -> None:
    kind = ObjectKind.MESSAGE
    spec = {**spec, "return_token_ids": False, "include_logprobs": False}
    body = whole(kind, output, **spec)
    stream = named_events(answer(kind, output, arrival, is_stream=True, **spec))
    snapshot, buffers = None, dict[int, bytes]()
    for event in stream:
        if event["type"] != "ping":
            parsed = MESSAGE_EVENT.validate_python(event)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    found = snapshot.to_dict()
    for name in ("stop_reason", "stop_sequence", "usage"):
        assert found[name] == body[name]
    blocks, whole_blocks = found["content"], body["content"]
    assert blocks[: len(whole_blocks)] == whole_blocks
    # Only a call that was cut is in the stream alone, as far as it came.
    assert [block["type"] for block in blocks[len(whole_blocks) :]] in ([], ["tool_use"])


@settings(max_examples=60, deadline=None)
@given(outputs(2), arrivals, options)
def test_text_events_say_what_a_chat_says(
    output: Output, arrival: Arrival, spec: dict[str, Any]
) -> None:
    spec = {**spec, "return_token_ids": True, "include_logprobs": False}
    body = whole(ObjectKind.CHAT_COMPLETION, output, **spec)
    for expected in body["choices"]:
        found, index = Joined(), expected["index"]
        for event in text_events(output, arrival, **spec):
            found.add(event, index)
        message = expected["message"]
        assert (found.content or None) == message["content"]
        assert (found.reasoning or None) == message["reasoning"]
        assert found.token_ids == expected["token_ids"]
        assert found.ends == [(expected["finish_reason"], expected["stop_reason"])]
        complete = [(name, arguments) for _, name, arguments in calls_of(message)]
        assert [tuple(call) for call in found.calls[: len(complete)]] == complete


@dataclass
class Joined:
    """One choice, put together from its events."""

    content: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    ends: list[tuple[str, str | int | None]] = field(default_factory=list)

    def add(self, event: Any, index: int) -> None:
        if isinstance(event, DeltaEvent) and event.index == index:
            assert not self.ends
            self.content += event.content
            self.reasoning += event.reasoning
            self.token_ids += event.token_ids
            for piece in event.tools:
                if piece.call_id:
                    self.calls.append([piece.name, ""])
                self.calls[piece.index][1] += piece.arguments
        elif isinstance(event, SequenceEndEvent) and event.index == index:
            self.ends.append((event.finish_reason, event.stop_reason))


def text_events(output: Output, arrival: Arrival, **spec: Any) -> list[Any]:
    """What an internal client gets for the same tokens."""
    request, response = started(ObjectKind.CHAT_COMPLETION, output, **spec)
    writer = EventWriter(response, request.output, ReaderLimits())
    found: list[Any] = []
    feed(request, response, output, arrival, lambda: found.extend(writer.collect()))
    return found


CALLS = (
    "R</think>Look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>K\u00f6ln \U0001f327"
    "</arg_value><arg_key>days</arg_key><arg_value>12</arg_value></tool_call>"
    "<tool_call>now</tool_call>"
)


@pytest.mark.parametrize("is_stream", [False, True])
def test_however_little_room_is_left_no_call_is_broken(is_stream: bool) -> None:
    """Cut behind every token: a complete call or none, and always an honest length."""
    tokens, kind = ids(CALLS), ObjectKind.CHAT_COMPLETION
    found = set()
    for room in range(len(tokens)):
        output = Output((tuple(tokens[:room]),), FinishReason.LENGTH)
        data = answer(kind, output, WHOLE, is_stream=is_stream, starts_in_reasoning=True)
        if is_stream:
            (*_, last, done) = events(data)
            assert done == "[DONE]"
            assert last["choices"][0]["finish_reason"] == "length"
            continue
        choice = json.loads(data)["choices"][0]
        assert choice["finish_reason"] == "length"
        check_calls(calls := calls_of(choice["message"]), {"get_weather", "now"})
        found.add(len(calls))
    assert is_stream or found == {0, 1}


def test_every_part_of_a_call_is_among_the_outputs() -> None:
    """Else the generator would seldom make one."""
    control = VOCABULARY.control
    drawn: set[int] = set()

    @settings(max_examples=100, deadline=None, database=None)
    @given(emitted)
    def draw(tokens: tuple[int, ...]) -> None:
        drawn.update(tokens)

    draw()
    assert {control.tool_call, control.end_tool_call, control.arg_key, control.arg_value} <= drawn


def test_a_mix_up_of_choices_would_be_seen() -> None:
    """The comparison is not blind: other tokens give another answer."""
    one = Output(((97, 98),), FinishReason.STOP)
    other = replace(one, choices=((97, 99),))
    kind = ObjectKind.CHAT_COMPLETION
    assert whole(kind, one)["choices"] != whole(kind, other)["choices"]
