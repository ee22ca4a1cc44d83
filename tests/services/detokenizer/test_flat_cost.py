"""The last tokens of a long output cost what its first ones did, whatever field they belong to.

Processor time of this thread is compared inside one run, so the speed of the machine cancels out.
Work that grows with the output makes the last eighth 15 times as dear as the first; steady work
leaves the ratio near 1, and 4 is far from both.
"""

import gc
import time
from typing import Any

import pytest

from services.detokenizer.build import build_presenter, build_response
from services.detokenizer.messages import ObjectKind
from tests.services.detokenizer.frames import CONTEXT, SPECS, logprobs, submit
from tests.services.detokenizer.words import ids

NUM_TOKENS = 16_000
MAX_RATIO = 4.0
CALL = "</think><tool_call>get_weather<arg_key>{}</arg_key><arg_value>"
FIELDS = {
    "reasoning": "",
    "content": "</think>",
    "string argument": CALL.format("city"),
    "argument that waits": CALL.format("days"),
}
KINDS = [ObjectKind.CHAT_COMPLETION, ObjectKind.RESPONSE, ObjectKind.MESSAGE]


def ratio(begin: str, **spec: Any) -> float:
    """Time of the last eighth over that of the first."""
    request = submit(tools=SPECS, starts_in_reasoning=True, **spec)
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    choice, values = response.choices[0], logprobs(1)
    choice.feed(ids(begin), logprobs(len(ids(begin))))
    tokens = ids("one two Paris ")
    times = []
    gc.disable()  # a collection looks at what all tests before have left
    try:
        for _ in range(8):
            start = time.thread_time()
            for number in range(NUM_TOKENS // 8):
                choice.feed([tokens[number % len(tokens)]], values)
                presenter.render(response.choices)
            times.append(time.thread_time() - start)
    finally:
        gc.enable()
    return times[-1] / times[0]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("field", FIELDS)
def test_a_token_costs_the_same_however_much_came_before(
    field: str, kind: ObjectKind, is_stream: bool
) -> None:
    spec = {"object_kind": kind, "is_stream": is_stream, "stop": ("never", "Paris  ")}
    assert min(ratio(FIELDS[field], **spec) for _ in range(2)) < MAX_RATIO


def test_so_it_does_in_a_completion_with_logprobs() -> None:
    kind = ObjectKind.TEXT_COMPLETION
    found = min(
        ratio("", object_kind=kind, is_stream=True, include_logprobs=True) for _ in range(2)
    )
    assert found < MAX_RATIO
