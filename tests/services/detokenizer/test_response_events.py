import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from services.detokenizer.messages import ObjectKind
from shared.endings import FinishReason
from tests.services.detokenizer.driven import CALL, THOUGHT_TEXT_CALLS, Driven, drive
from tests.services.detokenizer.test_ordered import TOKENS

ECHO = b'"parallel_tool_calls":true,"tool_choice":"auto","tools":[]'
SDK = TypeAdapter(ResponseStreamEvent)


def stream(output: object, **options: object) -> Driven:
    return drive(ObjectKind.RESPONSE, output, is_stream=True, echo_members=ECHO, **options)


def body(output: object, **options: object) -> dict:
    return drive(ObjectKind.RESPONSE, output, echo_members=ECHO, **options).body


def short(kinds: list[str]) -> list[str]:
    """Without the common prefix, deltas of a run as one."""
    names = [kind.removeprefix("response.") for kind in kinds]
    return [
        name
        for before, name in zip(["", *names], names, strict=False)
        if not (name == before and name.endswith(".delta"))
    ]


def test_events_come_in_the_official_order() -> None:
    assert short(stream("R</think>Hi<tool_call>now</tool_call>").kinds) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_every_event_is_one_of_the_sdk_and_they_are_numbered() -> None:
    events = stream(THOUGHT_TEXT_CALLS, include_logprobs=True).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert SDK.validate_python(event).type == event["type"]


def check_deltas(driven: Driven) -> None:
    """The deltas of each item join to what its done events say."""
    text: dict[int, str] = {}
    for event in driven.events:
        kind = event["type"]
        if kind.endswith(".delta"):
            place = event["output_index"]
            text[place] = text.get(place, "") + event["delta"]
        elif kind.endswith(("_text.done", "arguments.done")):
            whole = event.get("text", event.get("arguments"))
            assert text.get(event["output_index"], "") == whole


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.integers(1, 50))
def test_for_any_output_the_last_event_holds_the_very_object_of_a_body(
    tokens: list[int], reason: FinishReason, every: int
) -> None:
    driven = stream(tokens, reason=reason, rendered_every=every)
    check_deltas(driven)
    assert driven.events[-1]["response"] == body(tokens, reason=reason)


def test_the_last_event_and_the_body_agree_on_logprobs() -> None:
    options = {"include_logprobs": True, "reason": FinishReason.LENGTH}
    text = f"R</think>ab{CALL}cd"
    assert stream(text, **options).events[-1]["response"] == body(text, **options)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        # blanks wait for what follows, and their tokens with them
        ("R</think> \nHi \n", [[" \n", "H", "i", " \n"]]),
        ("</think> ", [[" "]]),
        # what is dropped in front of a call is nobody's
        (f"</think>a \n{CALL} b", [["a"], [" ", "b"]]),
        (f"</think>a{CALL}\n{CALL}b", [["a"], ["b"]]),
    ],
)
@pytest.mark.parametrize("groups", [(1,), (3, 2), (1000,)])
def test_logprobs_stand_with_the_text_of_their_tokens(
    text: str, messages: list[list[str]], groups: tuple[int, ...]
) -> None:
    options = {"include_logprobs": True, "groups": groups}
    for found in (body(text, **options), stream(text, **options).events[-1]["response"]):
        parts = [item["content"][0] for item in found["output"] if item["type"] == "message"]
        assert [[entry["token"] for entry in part["logprobs"]] for part in parts] == messages
        assert ["".join(tokens) for tokens in messages] == [part["text"] for part in parts]


@pytest.mark.parametrize("keeps", [True, False])
def test_the_object_is_kept_when_that_was_asked_for(keeps: bool) -> None:
    driven = stream("R</think>Hi", keep_object=keeps)
    assert bool(driven.presenter.kept()) is keeps
    if keeps:
        assert b'"output_text"' in driven.presenter.kept()


def test_a_cut_call_is_shown_as_far_as_it_came_and_is_incomplete() -> None:
    events = stream(
        "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Par",
        reason=FinishReason.LENGTH,
    ).events
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["status"] for event in done] == ["incomplete"]
    last = events[-1]
    assert (last["type"], last["response"]["output"]) == ("response.incomplete", [])


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.integers(1, 50))
def test_for_any_output_the_object_has_the_items_as_they_ended(
    tokens: list[int], reason: FinishReason, every: int
) -> None:
    events = stream(tokens, reason=reason, rendered_every=every).events
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    is_cut_call = [i["type"] == "function_call" and i["status"] == "incomplete" for i in done]
    kept = [item for item, is_cut in zip(done, is_cut_call, strict=True) if not is_cut]
    assert events[-1]["response"]["output"] == kept


def test_a_call_that_is_whole_at_the_end_is_completed() -> None:
    events = stream(f"</think>Hi{CALL}", reason=FinishReason.LENGTH).events
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "completed"]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"] == done
