import json
from typing import Any

from services.detokenizer.build import build_presenter, build_response, upstream_submit
from services.detokenizer.delivery import Delivery, ReaderLimits
from services.detokenizer.messages import TextFinished
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from tests.services.detokenizer.frames import CONTEXT, FakeUpstream, events, finished, submit
from tests.services.detokenizer.words import EOS, ids

LIMITS = ReaderLimits(max_pending_bytes=1000, max_stall_s=30.0)


def delivery(*, credit: int, is_stream: bool = True, **options: Any) -> tuple[Delivery, Any]:
    request = submit(is_stream=is_stream, **options)
    response, upstream = build_response(request, CONTEXT, 0.0), FakeUpstream()
    response.start(upstream, upstream_submit(request, response, CONTEXT, "i"))
    presenter = build_presenter(response, request.output, CONTEXT)
    made = Delivery(response, presenter, LIMITS, is_stream=is_stream, credit_bytes=credit)
    return made, upstream


def admit(made: Delivery) -> None:
    made.response.on_verdict(0, None)


def feed(made: Delivery, text: str) -> None:
    choice = made.response.choices[0]
    made.response.on_tokens(0, choice.num_received, ids(text), None)


def end(made: Delivery) -> None:
    made.response.on_tokens(0, made.response.choices[0].num_received, [EOS], None)
    made.response.on_end(0, finished())


def test_nothing_is_said_before_the_verdict_and_the_verdict_once() -> None:
    made, _ = delivery(credit=10_000)
    assert not made.take(0.0).has_verdict
    admit(made)
    feed(made, "a")
    first, second = made.take(0.0), made.take(0.0)
    assert (first.has_verdict, first.refusal, bool(first.frames)) == (True, None, True)
    assert (second.has_verdict, second.frames) == (False, b"")


def test_a_refusal_is_all_there_is() -> None:
    made, _ = delivery(credit=10_000)
    made.response.on_verdict(0, RequestError(FailureReason.QUEUE_FULL, "full"))
    output = made.take(0.0)
    assert output.refusal is not None
    assert (output.frames, output.end, made.is_over) == (b"", None, True)


def test_a_fast_reader_gets_every_step_and_the_end_behind_the_last_frame() -> None:
    made, _ = delivery(credit=10_000)
    admit(made)
    feed(made, "a")
    data = made.take(0.0).frames
    end(made)
    output = made.take(0.0)
    assert isinstance(output.end, TextFinished)
    assert events(data + output.frames)[-1] == "[DONE]"


def test_without_credit_deltas_merge_into_one() -> None:
    made, _ = delivery(credit=1)
    admit(made)
    feed(made, "a")
    assert made.take(0.0).frames, "a little credit is enough for one frame"
    for _ in range(50):
        feed(made, "bc")
        assert made.take(1.0).frames == b""
    made.add_credit(10_000)
    (event,) = events(made.take(2.0).frames)
    assert event["choices"][0]["delta"]["content"] == "bc" * 50


def test_the_end_waits_for_credit_too() -> None:
    made, _ = delivery(credit=0)
    admit(made)
    feed(made, "a")
    end(made)
    assert made.take(0.0).end is None
    made.add_credit(1)
    output = made.take(1.0)
    assert isinstance(output.end, TextFinished)
    assert events(output.frames)[-1] == "[DONE]"


def test_a_reader_who_leaves_too_much_lying_loses_the_request() -> None:
    made, upstream = delivery(credit=0)
    admit(made)
    feed(made, "x" * 900)
    made.take(0.0)
    made.tick(0.1)
    assert made.response.end is None
    feed(made, "x" * 200)
    made.tick(0.2)
    output = made.take(0.2)
    assert isinstance(output.end, RequestError)
    assert output.end.reason is FailureReason.SLOW_READER
    assert upstream.aborts == [(0, AbortReason.SLOW_READER, 0)]
    assert output.frames == b""


def test_a_reader_who_takes_nothing_for_too_long_loses_the_request() -> None:
    made, _ = delivery(credit=0)
    admit(made)
    feed(made, "a")
    made.take(5.0)
    made.tick(34.9)
    assert made.response.end is None
    made.tick(35.0)
    assert isinstance(made.response.end, RequestError)


def test_credit_in_time_ends_the_stall() -> None:
    made, _ = delivery(credit=0)
    admit(made)
    feed(made, "a")
    made.take(5.0)
    made.add_credit(10_000)
    made.take(30.0)
    made.tick(50.0)
    assert made.response.end is None


def test_a_quiet_stream_without_credit_is_no_stall() -> None:
    made, _ = delivery(credit=0)
    admit(made)
    made.take(0.0)
    made.tick(50.0)
    assert made.response.end is None


def test_an_unread_complete_answer_is_given_up() -> None:
    made, _ = delivery(credit=0)
    admit(made)
    end(made)
    made.take(0.0)
    made.tick(31.0)
    output = made.take(31.0)
    assert isinstance(output.end, RequestError)
    assert made.is_over


def test_a_failure_comes_behind_the_text_so_far_and_without_done() -> None:
    made, _ = delivery(credit=10_000)
    admit(made)
    feed(made, "ab")
    made.response.on_end(0, RequestError(FailureReason.UPSTREAM_LOST, "gone"))
    output = made.take(0.0)
    assert b"[DONE]" not in output.frames
    reasons = [event["choices"][0]["finish_reason"] for event in events(output.frames)]
    assert reasons == [None, None]
    assert isinstance(output.end, RequestError)


def test_a_body_needs_no_credit() -> None:
    made, _ = delivery(credit=0, is_stream=False)
    admit(made)
    feed(made, "x" * 5000)
    assert made.take(0.0).frames == b""
    made.tick(50.0)
    end(made)
    body = json.loads(made.take(51.0).frames)
    assert len(body["choices"][0]["message"]["content"]) == 5000


def test_the_end_alone_can_be_taken_when_frames_cannot_be_built() -> None:
    made, _ = delivery(credit=10_000)
    admit(made)
    made.response.abort(RequestError(FailureReason.INTERNAL, "x"))
    output = made.take_failure()
    assert (output.has_verdict, output.frames) == (True, b"")
    assert isinstance(output.end, RequestError)
