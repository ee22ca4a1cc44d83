import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer import session
from services.detokenizer.delivery import ReaderLimits
from services.detokenizer.live import LiveRequests
from services.detokenizer.messages import TextFinished
from services.detokenizer.session import Incoming, Outgoing, Session, StreamSubmit
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.sampling import LoadSnapshot
from tests.services.detokenizer.frames import CONTEXT, FakeUpstream, events, finished, submit
from tests.services.detokenizer.words import EOS, ids


class Frontend:
    """A session and what its frontend knows."""

    def __init__(self, upstream: FakeUpstream | None = None) -> None:
        self.upstream = upstream or FakeUpstream()
        self.live = LiveRequests()
        self.num_wakes = 0
        self.session = Session(CONTEXT, self.upstream, self.live, ReaderLimits(), self._wake)
        self.verdicts: dict[int, RequestError | None] = {}
        self.frames: dict[int, bytes] = {}
        self.ends: dict[int, Any] = {}

    def _wake(self) -> None:
        self.num_wakes += 1

    def send(self, stream_id: int, request: Any, credit: int = 1 << 20) -> None:
        incoming = StreamSubmit(stream_id=stream_id, submit=request, initial_credit_bytes=credit)
        self.session.handle(Incoming(submits=[incoming]), 0.0)

    def read(self, now: float = 0.0) -> Outgoing:
        outgoing = self.session.collect(now)
        for stream_id, refusal in outgoing.verdicts:
            assert stream_id not in self.verdicts, "two verdicts"
            self.verdicts[stream_id] = refusal
        for stream_id, data in outgoing.frames:
            assert self.verdicts[stream_id] is None
            assert stream_id not in self.ends, "frames behind the end"
            self.frames[stream_id] = self.frames.get(stream_id, b"") + data
        for stream_id, end in outgoing.ends:
            assert self.verdicts[stream_id] is None
            assert stream_id not in self.ends, "two ends"
            self.ends[stream_id] = end
        return outgoing


def test_one_message_holds_what_one_step_produced() -> None:
    frontend = Frontend()
    for stream_id in range(3):
        frontend.send(stream_id, submit(is_stream=True))
    for listener in frontend.upstream.listeners:
        listener.on_verdict(0, None)
        listener.on_tokens(0, 0, ids("a"), None)
    outgoing = frontend.read()
    assert len(outgoing.verdicts) == len(outgoing.frames) == 3
    assert not frontend.session.collect(0.0)


def test_a_request_runs_to_its_end() -> None:
    frontend = Frontend()
    frontend.send(5, submit())
    (listener,) = frontend.upstream.listeners
    listener.on_verdict(0, None)
    listener.on_tokens(0, 0, [*ids("ab"), EOS], None)
    listener.on_end(0, finished())
    frontend.read()
    assert isinstance(frontend.ends[5], TextFinished)
    body = json.loads(frontend.frames[5])
    assert body["choices"][0]["message"]["content"] == "ab"
    assert len(frontend.session) == len(frontend.live) == 0


@pytest.mark.parametrize(
    "request_",
    [
        RequestError(FailureReason.INVALID_ARGUMENT, "unreadable"),
        replace(submit(), sequences=()),
    ],
)
def test_a_bad_request_is_refused_alone(request_: Any) -> None:
    frontend = Frontend()
    frontend.send(1, request_)
    frontend.send(2, submit())
    frontend.read()
    refusal = frontend.verdicts[1]
    assert refusal is not None
    assert refusal.reason is FailureReason.INVALID_ARGUMENT
    assert len(frontend.upstream.submits) == 1
    assert frontend.num_wakes


def test_a_stream_id_in_use_is_refused() -> None:
    frontend = Frontend()
    frontend.send(1, submit())
    frontend.send(1, submit())
    (verdict,) = frontend.read().verdicts
    assert verdict[1] is not None
    assert verdict[1].reason is FailureReason.ALREADY_EXISTS


def test_a_draining_service_refuses() -> None:
    frontend = Frontend()
    frontend.live.is_draining = True
    frontend.send(1, submit())
    frontend.read()
    refusal = frontend.verdicts[1]
    assert refusal is not None
    assert refusal.reason is FailureReason.DRAINING


def test_a_frontend_hears_something_at_least_once_a_second() -> None:
    frontend = Frontend()
    first = frontend.read(10.0)
    assert first
    assert first.is_first
    woken = frontend.num_wakes
    frontend.session.tick(10.9)
    assert frontend.num_wakes == woken
    assert not frontend.read(10.9)
    frontend.session.tick(11.0)
    assert frontend.num_wakes == woken + 1
    sign = frontend.read(11.0)
    assert sign
    assert not sign.is_first
    # What is said anyway counts as well.
    frontend.send(1, submit())
    frontend.upstream.listeners[0].on_verdict(0, None)
    assert frontend.read(11.5).verdicts
    frontend.session.tick(12.2)
    assert not frontend.read(12.2)


def test_a_drain_is_told_at_once_and_with_whatever_comes_later() -> None:
    frontend = Frontend()
    frontend.send(1, submit(is_stream=True))
    frontend.upstream.listeners[0].on_verdict(0, None)
    assert not frontend.read().is_draining
    frontend.live.is_draining = True
    woken = frontend.num_wakes
    frontend.session.show_drain()
    assert frontend.num_wakes == woken + 1
    told = frontend.read()
    assert told
    assert told.is_draining
    assert not frontend.session.collect(0.0)
    frontend.upstream.listeners[0].on_tokens(0, 0, ids("a"), None)
    assert frontend.read().is_draining


def test_a_later_attempt_has_an_id_of_its_own_at_the_scheduler_and_none_else() -> None:
    frontend = Frontend()
    frontend.send(1, submit())
    frontend.send(2, replace(submit(), attempt=1))
    assert [sent.request_id for sent in frontend.upstream.submits] == ["r", "r.1"]
    for listener in frontend.upstream.listeners:
        listener.on_verdict(0, None)
    assert frontend.live.abort("r") == 2


def test_an_abort_reaches_the_scheduler_and_is_answered_by_an_end() -> None:
    frontend = Frontend()
    frontend.send(1, submit())
    frontend.upstream.listeners[0].on_verdict(0, None)
    frontend.session.handle(Incoming(aborted_stream_ids=[1, 99]), 0.0)
    frontend.read()
    assert frontend.ends[1].reason is FailureReason.CANCELLED
    assert frontend.upstream.aborts == [(0, AbortReason.CANCELLED, 0)]
    assert not len(frontend.session)


def test_an_abort_in_the_message_of_its_submit_counts() -> None:
    frontend = Frontend()
    incoming = StreamSubmit(stream_id=1, submit=submit())
    frontend.session.handle(Incoming(submits=[incoming], aborted_stream_ids=[1]), 0.0)
    frontend.read()
    assert frontend.verdicts[1] is not None
    assert frontend.upstream.aborts


def test_an_abort_ends_an_answer_that_is_complete_and_waits_for_credit() -> None:
    """Its reader is gone, so no credit will come: nobody waits for a slow one's time."""
    frontend = Frontend()
    frontend.send(1, submit(is_stream=True), credit=0)
    (listener,) = frontend.upstream.listeners
    listener.on_verdict(0, None)
    listener.on_tokens(0, 0, ids("a"), None)
    listener.on_end(0, finished())
    frontend.read()
    assert 1 not in frontend.ends
    frontend.session.handle(Incoming(aborted_stream_ids=[1]), 0.0)
    assert frontend.read().ends
    assert frontend.ends[1].reason is FailureReason.CANCELLED
    assert len(frontend.session) == len(frontend.live) == 0


def test_credit_lets_a_stream_go_on() -> None:
    frontend = Frontend()
    frontend.send(1, submit(is_stream=True), credit=0)
    (listener,) = frontend.upstream.listeners
    listener.on_verdict(0, None)
    listener.on_tokens(0, 0, ids("a"), None)
    assert not frontend.read().frames
    frontend.session.handle(Incoming(credits={1: 1000, 99: 5}), 0.0)
    assert frontend.read().frames


def test_credit_that_nothing_waits_for_wakes_nobody() -> None:
    frontend = Frontend()
    frontend.send(1, submit(is_stream=True))
    (listener,) = frontend.upstream.listeners
    listener.on_verdict(0, None)
    listener.on_tokens(0, 0, ids("a"), None)
    assert frontend.read().frames
    before = frontend.num_wakes
    frontend.session.handle(Incoming(credits={1: 1000}), 0.0)
    assert frontend.num_wakes == before
    listener.on_tokens(0, 1, ids("b"), None)
    assert frontend.num_wakes == before + 1
    assert frontend.read().frames


def test_what_one_step_brings_wakes_the_writer_once() -> None:
    frontend = Frontend()
    for stream_id in range(3):
        frontend.send(stream_id, submit(is_stream=True))
    for listener in frontend.upstream.listeners:
        listener.on_verdict(0, None)
    frontend.read()
    before = frontend.num_wakes
    for listener in frontend.upstream.listeners:
        listener.on_tokens(0, 0, ids("a"), None)
    assert frontend.num_wakes == before + 1
    assert len(frontend.read().frames) == 3


def test_a_slow_reader_is_ended_by_the_clock() -> None:
    frontend = Frontend()
    frontend.send(1, submit(is_stream=True), credit=0)
    (listener,) = frontend.upstream.listeners
    listener.on_verdict(0, None)
    listener.on_tokens(0, 0, ids("a"), None)
    frontend.read(1.0)
    frontend.session.tick(40.0)
    frontend.read(40.0)
    assert frontend.ends[1].reason is FailureReason.SLOW_READER


def test_a_lost_connection_aborts_everything_on_it() -> None:
    frontend = Frontend()
    for stream_id in range(3):
        frontend.send(stream_id, submit(2))
    frontend.session.close()
    assert len(frontend.upstream.aborts) == 6
    assert len(frontend.live) == 0


def test_the_latest_load_is_relayed_once() -> None:
    frontend = Frontend()
    frontend.session.show_load(LoadSnapshot(num_running=1))
    frontend.session.show_load(LoadSnapshot(num_running=2))
    load = frontend.session.collect(0.0).load
    assert load is not None
    assert load.num_running == 2
    assert frontend.session.collect(0.0).load is None


def test_a_request_whose_frames_cannot_be_built_fails_alone() -> None:
    frontend = Frontend()
    for stream_id in (1, 2):
        frontend.send(stream_id, submit(is_stream=True))
    broken, fine = frontend.upstream.listeners
    for listener in (broken, fine):
        listener.on_verdict(0, None)
    broken.choices[0].text.delta.content.append(object())  # type: ignore[attr-defined]  # a bug
    broken.on_change()  # type: ignore[attr-defined]  # as it would be called
    fine.on_tokens(0, 0, ids("a"), None)
    frontend.read()
    assert frontend.ends[1].reason is FailureReason.INTERNAL
    assert "object" not in frontend.ends[1].message
    assert events(frontend.frames[2])
    assert (0, AbortReason.CANCELLED, 0) in frontend.upstream.aborts


@pytest.mark.parametrize("part", ["build_response", "build_presenter", "upstream_submit"])
def test_a_request_that_cannot_be_built_fails_alone(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = Frontend()
    frontend.send(1, submit(is_stream=True))
    frontend.upstream.listeners[0].on_verdict(0, None)
    with monkeypatch.context() as patch:
        patch.setattr(session, part, lambda *_: [].pop())
        frontend.send(2, submit(is_stream=True))
    frontend.upstream.listeners[0].on_tokens(0, 0, ids("a"), None)
    frontend.read()
    refusal = frontend.verdicts[2]
    assert refusal is not None
    assert refusal.reason is FailureReason.INTERNAL
    assert "pop" not in refusal.message
    assert events(frontend.frames[1])
    assert len(frontend.live) == 1


steps = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(
            ["submit", "verdict", "refuse", "tokens", "end", "fail", "abort", "credit", "read"]
        ),
    ),
    max_size=40,
)


@given(steps, st.booleans())
def test_every_admitted_request_ends_exactly_once_whatever_comes(
    script: list[tuple[int, str]], are_readers_gone: bool
) -> None:
    frontend = Frontend()
    listeners: dict[int, Any] = {}
    told: set[int] = set()
    for stream_id, act in script:
        if act == "submit" and stream_id not in listeners:
            frontend.send(stream_id, submit(is_stream=stream_id % 2 == 0), credit=200)
            listeners[stream_id] = frontend.upstream.listeners[-1]
        elif act == "read":
            frontend.read()
        elif act == "abort":
            frontend.session.handle(Incoming(aborted_stream_ids=[stream_id]), 0.0)
        elif act == "credit":
            frontend.session.handle(Incoming(credits={stream_id: 500}), 0.0)
        elif stream_id in listeners and stream_id not in told:
            listener = listeners[stream_id]
            if act == "verdict" and not listener.is_admitted:
                listener.on_verdict(0, None)
            elif act == "tokens" and listener.is_admitted:
                listener.on_tokens(0, listener.choices[0].num_received, ids("ab"), None)
            elif act == "refuse" and not listener.is_admitted:
                listener.on_verdict(0, RequestError(FailureReason.QUEUE_FULL, "full"))
                told.add(stream_id)
            elif act in ("end", "fail") and listener.is_admitted:
                lost = RequestError(FailureReason.UPSTREAM_LOST, "gone")
                listener.on_end(0, finished() if act == "end" else lost)
                told.add(stream_id)
    for stream_id in set(listeners) - told:
        lost = RequestError(FailureReason.UPSTREAM_LOST, "gone")
        listeners[stream_id].on_end(0, lost)
    if are_readers_gone:
        frontend.session.handle(Incoming(aborted_stream_ids=list(listeners)), 0.0)
    else:
        frontend.session.handle(Incoming(credits=dict.fromkeys(listeners, 1 << 20)), 0.0)
    frontend.read()
    for stream_id in listeners:
        refused = frontend.verdicts[stream_id] is not None
        assert refused != (stream_id in frontend.ends)
    assert len(frontend.session) == len(frontend.live) == 0
