import base64
import json

import pytest
from openai.types.responses import Response

from services.detokenizer.messages import ObjectKind
from shared.endings import FinishReason
from tests.services.detokenizer.driven import CALL, THOUGHT_TEXT_CALLS, drive
from tests.services.detokenizer.words import ids

ECHO = b'"metadata":{"a":"b"},"parallel_tool_calls":true,"tool_choice":"auto","tools":[]'


def respond(output: str, **options: object) -> dict:
    return drive(ObjectKind.RESPONSE, output, echo_members=ECHO, **options).body


def test_items_stand_in_the_order_of_the_output() -> None:
    body = respond(THOUGHT_TEXT_CALLS)
    assert [item["type"] for item in body["output"]] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    reasoning, message, weather, now = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "R 1"}]
    assert message["content"][0]["text"] == "Hi"
    assert (weather["name"], json.loads(weather["arguments"])) == ("get_weather", {"city": "Paris"})
    assert (now["name"], now["arguments"], now["call_id"]) == ("now", "{}", "call_x")
    assert len({item["id"] for item in body["output"]}) == 4


def test_the_sdk_reads_the_object_and_what_was_echoed() -> None:
    response = Response.model_validate(respond(THOUGHT_TEXT_CALLS, num_cached_tokens=2))
    assert (response.id, response.object, response.status) == ("r", "response", "completed")
    assert response.metadata == {"a": "b"}
    assert response.output_text == "Hi"
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (3, 2)
    # Every token of the output and the one that ended it.
    assert usage.output_tokens == len(ids(THOUGHT_TEXT_CALLS)) + 1
    assert usage.output_tokens_details.reasoning_tokens == 3
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_cut_answer_is_incomplete_and_says_why() -> None:
    body = respond("R</think>Hello", reason=FinishReason.LENGTH)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]


def test_a_cut_call_is_no_part_of_the_object() -> None:
    body = respond(f"</think>{CALL}<tool_call>get_weather<arg_key>city", reason=FinishReason.LENGTH)
    assert [item["name"] for item in body["output"]] == ["get_weather"]


@pytest.mark.parametrize(
    ("output", "statuses"),
    [
        (f"R</think>Hi{CALL}", ["completed", "completed", "completed"]),
        (f"</think>{CALL}{CALL}", ["completed", "completed"]),
        (f"</think>Hi{CALL}\n", ["completed", "completed"]),
        (f"</think>{CALL}more", ["completed", "incomplete"]),
        ("</think>Hi<tool_call>get_weather<arg_key>city", ["completed"]),
        ("</think>Hi<tool_call>get_wea", ["incomplete"]),
        ("thought", ["incomplete"]),
    ],
)
def test_only_the_item_that_was_cut_is_incomplete(output: str, statuses: list[str]) -> None:
    body = respond(output, reason=FinishReason.LENGTH)
    assert body["status"] == "incomplete"
    assert [item["status"] for item in body["output"]] == statuses


def test_reasoning_may_be_hidden_or_carried_by_the_client() -> None:
    hidden = respond("R</think>Hi", include_reasoning=False)
    assert [item["type"] for item in hidden["output"]] == ["message"]
    sealed = respond("Ré</think>Hi", include_sealed_reasoning=True)["output"][0]
    mark, _, text = sealed["encrypted_content"].partition(":")
    assert (mark, base64.b64decode(text).decode()) == ("glm1", "Ré")


def test_logprobs_are_those_of_the_messages_alone() -> None:
    body = respond(f"R</think>ab{CALL}cd", include_logprobs=True, reason=FinishReason.LENGTH)
    tokens = [
        [entry["token"] for entry in item["content"][0]["logprobs"]]
        for item in body["output"]
        if item["type"] == "message"
    ]
    assert tokens == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("groups", [(1,), (5, 2), (1000,)])
def test_the_object_does_not_depend_on_how_tokens_came(groups: tuple[int, ...]) -> None:
    assert respond(THOUGHT_TEXT_CALLS, groups=groups) == respond(THOUGHT_TEXT_CALLS)
