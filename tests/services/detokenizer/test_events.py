from typing import Any

from services.detokenizer.build import build_response, upstream_submit
from services.detokenizer.delivery import ReaderLimits
from services.detokenizer.events import DeltaEvent, EventWriter, SequenceEndEvent
from services.detokenizer.messages import TextFinished
from shared.endings import FinishReason
from shared.errors import FailureReason, RequestError
from tests.services.detokenizer.frames import CONTEXT, SPECS, FakeUpstream, finished, submit
from tests.services.detokenizer.words import EOS, ids


def writer(num_sequences: int = 1, **options: Any) -> EventWriter:
    request = submit(num_sequences, return_token_ids=True, **options)
    response = build_response(request, CONTEXT, 0.0)
    response.start(FakeUpstream(), upstream_submit(request, response, CONTEXT, "i"))
    for position in range(num_sequences):
        response.on_verdict(position, None)
    return EventWriter(response, request.output, ReaderLimits(max_stall_s=30.0))


def test_text_calls_and_ids_come_as_events_and_the_end_last() -> None:
    made = writer(starts_in_reasoning=True, tools=SPECS)
    tokens = [*ids("R</think>C<tool_call>now</tool_call>"), EOS]
    made.response.on_tokens(0, 0, tokens, None)
    made.response.on_end(0, finished(num_steps=3))
    delta, sequence_end, end = made.collect()
    assert isinstance(delta, DeltaEvent)
    assert (delta.reasoning, delta.content, delta.token_ids) == ("R", "C", tokens)
    assert [(piece.name, piece.arguments) for piece in delta.tools] == [("now", "{}")]
    assert isinstance(sequence_end, SequenceEndEvent)
    assert (sequence_end.finish_reason, sequence_end.stats.num_steps) == ("tool_calls", 3)
    assert sequence_end.stats.num_output_tokens == len(tokens)
    assert isinstance(end, TextFinished)


def test_events_merge_while_nobody_reads() -> None:
    made = writer()
    for i in range(10):
        made.response.on_tokens(0, i, ids("a"), None)
    (delta,) = made.collect()
    assert isinstance(delta, DeltaEvent)
    assert delta.content == "a" * 10
    assert made.collect() == []


def test_the_end_of_a_choice_comes_once() -> None:
    made = writer(2)
    made.response.on_end(0, finished(FinishReason.LENGTH))
    assert len(made.collect()) == 1
    assert made.collect() == []
    made.response.on_end(1, finished(FinishReason.LENGTH))
    assert [type(event) for event in made.collect()] == [SequenceEndEvent, TextFinished]


def test_a_failure_is_the_last_event() -> None:
    made = writer()
    made.response.on_tokens(0, 0, ids("a"), None)
    made.response.on_end(0, RequestError(FailureReason.UPSTREAM_LOST, "gone"))
    assert isinstance(made.collect()[-1], RequestError)


def test_hidden_parts_are_not_told() -> None:
    made = writer(
        starts_in_reasoning=True, include_reasoning=False, parallel_tool_calls=False, tools=SPECS
    )
    tokens = ids("R</think><tool_call>now</tool_call><tool_call>now</tool_call>")
    made.response.on_tokens(0, 0, tokens, None)
    (delta,) = made.collect()
    assert isinstance(delta, DeltaEvent)
    assert delta.reasoning == ""
    assert [piece.index for piece in delta.tools] == [0]


def test_a_reader_that_blocks_is_ended_by_the_clock() -> None:
    made = writer()
    made.tick(50.0)
    assert made.response.end is None
    made.stalled_since = 1.0
    made.tick(31.0)
    assert isinstance(made.response.end, RequestError)
    assert made.response.end.reason is FailureReason.SLOW_READER
