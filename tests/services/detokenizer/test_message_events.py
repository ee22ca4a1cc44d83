from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from services.detokenizer.messages import ObjectKind
from shared.endings import FinishReason
from tests.services.detokenizer.driven import THOUGHT_TEXT_CALLS, Driven, drive
from tests.services.detokenizer.test_ordered import TOKENS

SDK: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def stream(output: object, **options: object) -> Driven:
    return drive(ObjectKind.MESSAGE, output, is_stream=True, **options)


def joined(driven: Driven) -> dict[str, Any]:
    """What the SDK puts together."""
    snapshot, buffers = None, dict[int, bytes]()
    for event in driven.events:
        if event["type"] != "ping":
            snapshot = accumulate_event(
                event=SDK.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
    assert snapshot is not None
    return snapshot.to_dict()


def test_events_come_in_the_official_order() -> None:
    kinds = stream("R</think>Hi<tool_call>now</tool_call>").kinds
    merged = [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert merged == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]


def test_the_sdk_puts_together_the_message_of_a_body() -> None:
    found = joined(stream(THOUGHT_TEXT_CALLS))
    whole = drive(ObjectKind.MESSAGE, THOUGHT_TEXT_CALLS).body
    for name in ("id", "content", "stop_reason", "stop_sequence", "usage"):
        assert found[name] == whole[name]


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.integers(1, 50))
def test_for_any_output_streamed_equals_unstreamed(tokens: list[int], every: int) -> None:
    found = joined(stream(tokens, rendered_every=every))
    whole = drive(ObjectKind.MESSAGE, tokens).body
    assert (found["content"], found["stop_reason"]) == (whole["content"], whole["stop_reason"])


def test_the_end_tells_reason_and_usage() -> None:
    events = stream("R</think>Hi", reason=FinishReason.LENGTH, num_cached_tokens=1).events
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["cache_read_input_tokens"] == 1
    assert events[-1] == {"type": "message_stop"}
    assert events[0]["message"]["usage"]["output_tokens"] == 0
