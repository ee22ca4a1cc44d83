from dataclasses import replace
from typing import Any

import pytest

from services.detokenizer.build import build_response, make_call_id, upstream_submit
from services.detokenizer.messages import ObjectKind, SequenceSpec, ToolChoice, ToolSpec
from shared.endings import FinishReason
from shared.errors import FailureReason, RequestError
from shared.wire import pack_ids
from tests.services.detokenizer.frames import CONTEXT, SPECS, finished, submit
from tests.services.detokenizer.words import EOS, ids

NOW = ToolSpec(name="now", parameters=None)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(submit(), request_id="é" * 65), "request_id"),
        (replace(submit(), sequences=()), "sequences"),
        (
            replace(submit(), sequences=(SequenceSpec(index=1, prompt_token_ids=b"1234"),)),
            "sequences",
        ),
        (
            replace(submit(), sequences=(SequenceSpec(index=0, prompt_token_ids=b""),)),
            "sequences.[0].prompt_token_ids",
        ),
        (
            replace(submit(), sequences=(SequenceSpec(index=0, prompt_token_ids=b"12345"),)),
            "sequences.[0].prompt_token_ids",
        ),
        (submit(stop=("a",) * 17), "output.stop"),
        (submit(stop=("",)), "output.stop"),
        (submit(stop=("é" * 129,)), "output.stop"),
        (submit(tools=(NOW,) * 129), "output.tools"),
        (
            submit(tools=(NOW,), tool_choice=ToolChoice.NAMED, tool_choice_name="x"),
            "output.tool_choice_name",
        ),
        (submit(2, echo_texts=("a",)), "output.echo_texts"),
    ],
)
def test_what_cannot_be_is_refused_by_field(request_: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_response(request_, CONTEXT, 0.0)
    assert (caught.value.reason, caught.value.field) == (FailureReason.INVALID_ARGUMENT, field)


def shown(text: str, **options: Any) -> tuple[str, int]:
    choice = build_response(submit(**options), CONTEXT, 0.0).choices[0]
    choice.feed(ids(text), None)
    choice.finish(finished(FinishReason.LENGTH))
    return "".join(choice.text.take().content), choice.text.num_calls


def test_tool_choice_decides_which_calls_are_shown() -> None:
    text = "<tool_call>now</tool_call><tool_call>raw</tool_call>"
    assert shown(text, tools=SPECS)[1] == 2
    assert shown(text, tools=SPECS, tool_choice=ToolChoice.REQUIRED)[1] == 2
    assert shown(text, tools=SPECS, tool_choice=ToolChoice.NONE)[1] == 0
    named = shown(text, tools=SPECS, tool_choice=ToolChoice.NAMED, tool_choice_name="raw")
    assert named[1] == 1
    assert shown(text)[1] == 0


def test_a_completion_is_plain_text() -> None:
    options = {"object_kind": ObjectKind.TEXT_COMPLETION}
    assert shown("<think>a</think>", **options)[0] == "<think>a</think>"


def test_every_choice_has_a_state_of_its_own() -> None:
    first, second = build_response(submit(2, stop=("ab",)), CONTEXT, 0.0).choices
    first.feed(ids("a"), None)
    second.feed(ids("b"), None)
    assert not second.is_stopped


def test_min_tokens_holds_for_stop_strings() -> None:
    options: dict[str, Any] = {"stop": ("a",), "sampling": {"min_tokens": 2}}
    assert shown("aaa", **options)[0] == "aa"


def test_ignored_end_tokens_pass() -> None:
    choice = build_response(submit(sampling={"ignore_eos": True}), CONTEXT, 0.0).choices[0]
    choice.feed([*ids("a"), EOS, *ids("b")], None)
    assert "".join(choice.text.take().content) == "ab"


def test_output_of_an_earlier_attempt_is_part_of_the_text() -> None:
    sequence = SequenceSpec(
        index=0, prompt_token_ids=pack_ids([1]), output_token_ids=pack_ids(ids("ab"))
    )
    request = replace(submit(), sequences=(sequence,))
    choice = build_response(request, CONTEXT, 0.0).choices[0]
    assert choice.num_received == 2
    assert "".join(choice.text.take().content) == "ab"
    logprobs = replace(request, output=replace(request.output, include_logprobs=True))
    with pytest.raises(RequestError, match="output_token_ids"):
        build_response(logprobs, CONTEXT, 0.0)


@pytest.mark.parametrize(
    ("asked", "sent"), [(0, 59_990), (5_000, 4_990), (100_000, 59_990), (1, 1)]
)
def test_the_scheduler_gets_a_little_less_time(asked: int, sent: int) -> None:
    request = replace(submit(), timeout_ms=asked, priority=3, tenant_id="t", cache_salt="s")
    response = build_response(request, CONTEXT, 0.0)
    upstream = upstream_submit(request, response, CONTEXT, "internal")
    assert upstream.timeout_ms == sent
    assert (upstream.request_id, upstream.priority) == ("internal", 3)
    assert (upstream.tenant_id, upstream.cache_salt) == ("t", "s")


def test_the_trace_goes_on_below_this_request() -> None:
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    request = replace(submit(), traceparent=parent)
    response = build_response(request, CONTEXT, 0.0)
    assert upstream_submit(request, response, CONTEXT, "i").traceparent == parent


def test_call_ids_differ() -> None:
    first, second = make_call_id(), make_call_id()
    assert first != second
    assert first.startswith("call_")
