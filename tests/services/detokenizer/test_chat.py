import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from services.detokenizer.build import build_presenter, build_response
from services.detokenizer.messages import ToolChoice
from shared.endings import FinishReason
from tests.services.detokenizer.frames import (
    CONTEXT,
    SPECS,
    events,
    finished,
    logprobs,
    submit,
)
from tests.services.detokenizer.words import EOS, ids

CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"


def chat(
    text: str,
    *,
    reason: FinishReason = FinishReason.STOP,
    group: int = 1,
    top: Any = (),
    **options: Any,
) -> Any:
    """The events of a stream, or the body."""
    request = submit(**options)
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    choice, data = response.choices[0], b""
    tokens = [*ids(text), *([EOS] if reason is FinishReason.STOP else [])]
    for start in range(0, len(tokens), group):
        piece = tokens[start : start + group]
        choice.feed(piece, logprobs(len(piece), top) if request.output.include_logprobs else None)
        data += presenter.render(response.choices)
    choice.finish(finished(reason))
    data += presenter.render(response.choices)
    return events(data) if request.output.is_stream else json.loads(data)


def joined(stream: list[Any]) -> dict[str, Any]:
    """What an OpenAI client puts together."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for event in stream:
        for choice in event["choices"] if event != "[DONE]" else []:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["type"] == "function"
                    message["tool_calls"].append(
                        {"name": piece["function"]["name"], "arguments": ""}
                    )
                message["tool_calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"]:
                message["finish_reason"] = choice["finish_reason"]
    return message


def test_the_first_chunk_has_the_role() -> None:
    first = chat("a", is_stream=True)[0]
    assert first == {
        "id": "r",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }


def test_deltas_carry_one_choice_with_the_documented_keys() -> None:
    delta = chat("a", is_stream=True)[1]["choices"]
    assert delta == [
        {
            "index": 0,
            "delta": {"content": "a"},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": None,
        }
    ]


def test_the_last_chunk_has_the_reason_once_and_done_follows() -> None:
    stream = chat("ab", is_stream=True)
    reasons = [e["choices"][0]["finish_reason"] for e in stream[:-1]]
    assert reasons == [None, None, None, "stop"]
    assert stream[-2]["choices"][0]["stop_reason"] is None
    assert stream[-2]["system_fingerprint"] == "glm-mesh-test"
    assert stream[-1] == "[DONE]"


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_a_stream_joins_to_the_body(group: int) -> None:
    text = f"R</think>Let me look.\n{CALL}<tool_call>now</tool_call>"
    options: dict[str, Any] = {"starts_in_reasoning": True, "tools": SPECS}
    message = joined(chat(text, is_stream=True, group=group, **options))
    choice = chat(text, **options)["choices"][0]
    assert choice["message"]["content"] == message["content"] == "Let me look."
    assert choice["message"]["reasoning"] == message["reasoning"] == "R"
    assert choice["message"]["reasoning_content"] == "R"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == message["tool_calls"]
    assert choice["finish_reason"] == message["finish_reason"] == "tool_calls"


def test_the_first_piece_of_a_call_has_id_type_name_and_empty_arguments() -> None:
    stream = chat(CALL, is_stream=True, tools=SPECS)
    pieces = [p for e in stream[:-1] for p in e["choices"][0]["delta"].get("tool_calls", [])]
    assert pieces[0] == {
        "index": 0,
        "id": "call_x",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert pieces[1] == {"index": 0, "function": {"arguments": '{"city": "'}}


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_the_reason_stands_behind_the_last_piece_of_a_call(group: int) -> None:
    """By that OpenAI's stream helper knows that the call is done."""
    stream = chat(f"Hi{CALL}<tool_call>now</tool_call>", is_stream=True, tools=SPECS, group=group)
    *others, last = [event["choices"][0] for event in stream[:-1]]
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert not any(entry["finish_reason"] for entry in others)
    assert "tool_calls" in others[-1]["delta"]
    state = ChatCompletionStreamState()
    kinds = [
        event.type
        for chunk in stream[:-1]
        for event in state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    ]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("content.done") == 1


def test_a_body_has_null_for_what_is_empty_and_no_empty_list_of_calls() -> None:
    body = chat("")
    assert body["object"] == "chat.completion"
    assert body["choices"][0] == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning": None,
            "reasoning_content": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


def test_a_cut_call_is_in_the_stream_and_not_in_the_body() -> None:
    text = CALL[: CALL.index("Paris") + 2]
    options: dict[str, Any] = {"reason": FinishReason.LENGTH, "tools": SPECS}
    message = joined(chat(text, is_stream=True, **options))
    choice = chat(text, **options)["choices"][0]
    assert message["tool_calls"] == [{"name": "get_weather", "arguments": '{"city": "Pa'}]
    assert "tool_calls" not in choice["message"]
    assert message["finish_reason"] == choice["finish_reason"] == "length"


def test_without_parallel_calls_only_the_first_is_shown() -> None:
    text = CALL + "<tool_call>now</tool_call>"
    options: dict[str, Any] = {"tools": SPECS, "parallel_tool_calls": False}
    assert len(joined(chat(text, is_stream=True, **options))["tool_calls"]) == 1
    body = chat(text, **options)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_hidden_reasoning_is_nowhere() -> None:
    options: dict[str, Any] = {"starts_in_reasoning": True, "include_reasoning": False}
    stream = chat("secret</think>C", is_stream=True, **options)
    assert joined(stream)["reasoning"] == ""
    assert len(stream) == 4
    message = chat("secret</think>C", **options)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "C")


def test_logprobs_cover_every_token_the_markup_and_the_end_too() -> None:
    text = "R</think>é"
    options: dict[str, Any] = {
        "starts_in_reasoning": True,
        "include_logprobs": True,
        "num_top_logprobs": 1,
        "top": [(97, -0.5)],
    }
    body = chat(text, **options)
    tokens = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert tokens == ["R", "</think>", "é", "<|endoftext|>"]
    stream = chat(text, is_stream=True, **options)
    streamed = [
        entry["token"]
        for event in stream[:-1]
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == tokens
    # a token without text still tells its logprobs
    assert {} in [event["choices"][0]["delta"] for event in stream[:-1]]


def test_token_ids_are_shown_when_asked_for() -> None:
    stream = chat("ab", is_stream=True, return_token_ids=True)
    shown = [i for e in stream[1:-1] for i in e["choices"][0]["token_ids"]]
    assert shown == [*ids("ab"), EOS]
    assert chat("ab", return_token_ids=True)["choices"][0]["token_ids"] == shown


def test_a_named_choice_ends_with_stop() -> None:
    body = chat(CALL, tools=SPECS, tool_choice=ToolChoice.NAMED, tool_choice_name="get_weather")
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["message"]["tool_calls"]


def test_text_with_line_separators_stays_one_event() -> None:
    text = "a\u2028b\u2029c\x85d\r\n\ne"
    assert joined(chat(text, is_stream=True))["content"] == text
    assert chat(text)["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_that_goes_on_begins_with_what_is_echoed(is_stream: bool) -> None:
    found = chat(" more", is_stream=is_stream, echo_texts=("Once",), starts_in_reasoning=False)
    if is_stream:
        assert joined(found)["content"] == "Once more"
    else:
        assert found["choices"][0]["message"]["content"] == "Once more"


@pytest.mark.parametrize("is_stream", [True, False])
def test_ids_of_the_prompt_stand_beside_those_of_the_output_once(is_stream: bool) -> None:
    found = chat("hi", is_stream=is_stream, return_token_ids=True)
    objects = found[:-1] if is_stream else [found]
    shown = [one["prompt_token_ids"] for one in objects if "prompt_token_ids" in one]
    assert len(shown) == 1
    assert shown[0]
    assert all(isinstance(token, int) for token in shown[0])


def test_a_measured_prompt_stands_beside_the_choices() -> None:
    request = submit(include_prompt_logprobs=True)
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    choice = response.choices[0]
    assert choice.take_prompt_logprobs(1, logprobs(2))
    choice.finish(finished(FinishReason.STOP))
    body = json.loads(presenter.render(response.choices))
    assert [entry and list(entry) for entry in body["prompt_logprobs"]] == [None, ["2"], ["3"]]


def test_tokens_of_logprobs_may_be_ids() -> None:
    body = chat(
        "hi",
        include_logprobs=True,
        num_top_logprobs=1,
        top=((5, -1.0),),
        return_tokens_as_token_ids=True,
    )
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in [*ids("hi"), EOS]]
    assert entries[0]["top_logprobs"][0]["token"] == "token_id:5"
