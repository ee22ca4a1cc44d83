import pytest
from anthropic.types import Message

from services.detokenizer.messages import ObjectKind, ToolChoice
from shared.endings import FinishReason
from tests.services.detokenizer.driven import CALL, THOUGHT_TEXT_CALLS, drive
from tests.services.detokenizer.words import ids


def message(output: str, **options: object) -> dict:
    return drive(ObjectKind.MESSAGE, output, **options).body


def test_blocks_stand_in_the_order_of_the_output() -> None:
    body = message(THOUGHT_TEXT_CALLS)
    thinking, text, weather, now = body["content"]
    assert thinking["thinking"] == "R 1"
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Hi"}
    assert weather == {
        "type": "tool_use",
        "id": "call_x",
        "name": "get_weather",
        "input": {"city": "Paris"},
    }
    assert now["input"] == {}
    assert body["stop_reason"] == "tool_use"


def test_the_sdk_reads_the_message() -> None:
    read = Message.model_validate(message("R</think>Hi", num_cached_tokens=2))
    assert (read.id, read.type, read.role, read.model) == ("r", "message", "assistant", "m")
    assert [block.type for block in read.content] == ["thinking", "text"]
    assert (read.usage.input_tokens, read.usage.cache_read_input_tokens) == (1, 2)
    assert read.usage.output_tokens == len(ids("R</think>Hi")) + 1


@pytest.mark.parametrize(
    ("output", "options", "reason", "sequence"),
    [
        ("</think>Hi", {}, "end_turn", None),
        ("</think>Hi", {"reason": FinishReason.LENGTH}, "max_tokens", None),
        ("</think>Hi there", {"stop": (" the",)}, "stop_sequence", " the"),
        (f"</think>{CALL}", {}, "tool_use", None),
        (
            f"</think>{CALL}",
            {"tool_choice": ToolChoice.NAMED, "tool_choice_name": "get_weather"},
            "tool_use",
            None,
        ),
    ],
)
def test_why_it_ended_is_told_in_the_words_of_this_api(
    output: str, options: dict, reason: str, sequence: str | None
) -> None:
    body = message(output, **options)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_a_cut_call_is_no_block() -> None:
    body = message(f"</think>{CALL}<tool_call>get_weather<arg_key>c", reason=FinishReason.LENGTH)
    assert [block["name"] for block in body["content"]] == ["get_weather"]
    assert body["stop_reason"] == "max_tokens"
