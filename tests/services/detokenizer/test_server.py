import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.glm.v1 import common_pb2, detokenizer_pb2
from services.detokenizer import server
from services.detokenizer.delivery import ReaderLimits
from services.detokenizer.live import LiveRequests
from services.detokenizer.messages import TextFinished
from services.detokenizer.server import (
    MAX_FRAME_BYTES,
    SIGN_INTERVAL_MS,
    DetokenizerServicer,
    DoorSettings,
    outgoing_to_proto,
)
from services.detokenizer.session import Outgoing
from shared.errors import FailureReason, RequestError
from shared.rpc import error_from_rpc
from shared.sampling import SequenceStats
from shared.wire import pack_ids
from tests.services.detokenizer.conftest import LIMIT_S, Mesh
from tests.services.detokenizer.frames import CONTEXT, FakeUpstream, events
from tests.services.detokenizer.words import ids

TOOL = detokenizer_pb2.ToolSpec(
    name="f", parameters_json=b'{"properties": {"n": {"type": "integer"}}}'
)
CALL = "<tool_call>f<arg_key>n</arg_key><arg_value>12</arg_value></tool_call>"


def content_of(data: bytes) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events(data)
        if event != "[DONE]"
        for choice in event["choices"]
    )


async def test_a_stream_comes_as_frames_with_one_end(mesh: Mesh) -> None:
    frontend = mesh.connect()
    await frontend.submit((3, mesh.submit("Hello, é!", is_stream=True)))
    await frontend.read_until_over(3)
    answer = frontend.answers[3]
    assert content_of(answer.data) == "Hello, é!"
    assert events(answer.data)[-1] == "[DONE]"
    assert answer.end is not None
    stats = answer.end.finished.stats
    count = len(mesh.dialect.encode("Hello, é!", allow_control=True)) + 1
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (2, count)
    frontend.call.cancel()


async def test_a_body_comes_whole_with_reasoning_and_calls(mesh: Mesh) -> None:
    frontend = mesh.connect()
    request = mesh.submit(
        "R</think>C" + CALL, starts_in_reasoning=True, tools=[TOOL], tool_choice=2
    )
    await frontend.submit((1, request))
    await frontend.read_until_over(1)
    body = json.loads(frontend.answers[1].data)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("R", "C")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"n": 12}'}
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    frontend.call.cancel()


async def test_the_end_tells_what_was_odd_in_the_output(mesh: Mesh) -> None:
    frontend = mesh.connect()
    odd = mesh.submit("a thought<tool_call>f</tool_call>", starts_in_reasoning=True)
    await frontend.submit((1, odd), (2, mesh.submit("fine")))
    await frontend.read_until_over(1, 2)
    first, second = (frontend.answers[i].end for i in (1, 2))
    assert first is not None
    assert first.finished.oddities.num_dropped_calls == 1
    assert second is not None
    assert not second.finished.HasField("oddities")
    frontend.call.cancel()


async def test_many_requests_share_the_stream_and_its_messages(mesh: Mesh) -> None:
    frontend = mesh.connect()
    texts = {i: f"answer number {i} " * 5 for i in range(32)}
    await frontend.submit(*((i, mesh.submit(text, is_stream=True)) for i, text in texts.items()))
    await frontend.read_until_over(*texts)
    assert {i: content_of(frontend.answers[i].data) for i in texts} == texts
    # Far fewer than the frames: what one step produced travels together.
    assert frontend.num_messages < 200
    frontend.call.cancel()


async def test_choices_of_one_request_interleave_and_end_together(mesh: Mesh) -> None:
    frontend = mesh.connect()
    request = mesh.submit("one two", num_sequences=3, is_stream=True, include_usage=True)
    await frontend.submit((1, request))
    await frontend.read_until_over(1)
    shown = events(frontend.answers[1].data)
    texts = ["", "", ""]
    for event in shown[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["one two"] * 3
    usage = shown[-2]["usage"]
    assert usage["prompt_tokens"] == 2
    assert usage["completion_tokens"] % 3 == 0
    assert len({s.stream_id for s in mesh.scheduler.submits[0].sequences}) == 3
    frontend.call.cancel()


async def test_a_stop_string_ends_here_and_the_scheduler_is_told(mesh: Mesh) -> None:
    mesh.scheduler.pause_s = 0.005
    frontend = mesh.connect()
    request = mesh.submit("one two three " + "x " * 500, is_stream=True, stop=["three"])
    await frontend.submit((1, request))
    await frontend.read_until_over(1)
    answer = frontend.answers[1]
    assert content_of(answer.data) == "one two "
    last = events(answer.data)[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "three")
    await mesh.until(lambda: bool(mesh.scheduler.aborts))
    (abort,) = mesh.scheduler.aborts
    kept = len(mesh.dialect.encode("one two three", allow_control=True))
    assert (abort.reason, abort.num_tokens_kept) == (2, kept)
    assert not mesh.scheduler.running
    frontend.call.cancel()


async def test_an_abort_reaches_the_scheduler(mesh: Mesh) -> None:
    mesh.scheduler.pause_s = 0.005
    frontend = mesh.connect()
    await frontend.submit((1, mesh.submit("x " * 2000, is_stream=True)))
    await frontend.read_until(lambda: bool(frontend.answers[1].data))
    await frontend.abort(1)
    await frontend.read_until_over(1)
    end = frontend.answers[1].end
    assert end is not None
    assert end.failed.reason == FailureReason.CANCELLED
    await mesh.until(lambda: not mesh.scheduler.running)
    frontend.call.cancel()


async def test_a_lost_frontend_aborts_its_requests(mesh: Mesh) -> None:
    mesh.scheduler.pause_s = 0.005
    frontend = mesh.connect()
    await frontend.submit(*((i, mesh.submit("x " * 2000, is_stream=True)) for i in range(3)))
    await frontend.read_until(lambda: all(frontend.answers[i].data for i in range(3)))
    frontend.call.cancel()
    await mesh.until(lambda: not mesh.scheduler.running)
    assert len(mesh.scheduler.aborts) == 3


async def test_a_request_that_cannot_be_is_refused_alone(mesh: Mesh) -> None:
    frontend = mesh.connect()
    broken = detokenizer_pb2.ToolSpec(name="f", parameters_json=b"{")
    bad = {
        1: mesh.submit("a", stop=[""]),
        2: mesh.submit("a", tools=[broken]),
        3: mesh.submit("a", object_kind=99),
        4: mesh.submit("a", tool_choice=99),
        5: mesh.submit("a", num_sequences=0),
    }
    await frontend.submit(*bad.items(), (6, mesh.submit("fine", is_stream=True)))
    await frontend.read_until_over(1, 2, 3, 4, 5, 6)
    for stream_id in bad:
        verdict = frontend.answers[stream_id].verdict
        assert verdict is not None
        assert verdict.refusal.reason == FailureReason.INVALID_ARGUMENT
        assert verdict.refusal.field
    assert content_of(frontend.answers[6].data) == "fine"
    frontend.call.cancel()


async def test_frames_stop_without_credit_and_go_on_with_it(mesh: Mesh) -> None:
    frontend = mesh.connect()
    text = "word " * 1000
    await frontend.submit((1, mesh.submit(text, is_stream=True)), credit=500)
    await mesh.until(lambda: bool(mesh.scheduler.submits) and not mesh.scheduler.running)
    # What comes later on the scheduler's stream is read later: then 1 is complete in there.
    await frontend.submit((2, mesh.submit("later")))
    await frontend.read_until_over(2)
    before = len(frontend.answers[1].data)
    assert before < len(text) // 2
    await frontend.give_credit(stream_1=1 << 20)
    await frontend.read_until_over(1)
    assert content_of(frontend.answers[1].data) == text
    # What came while there was no credit is merged.
    assert len(frontend.answers[1].data) < before + 2 * len(text)
    frontend.call.cancel()


@pytest.mark.parametrize("mesh_settings", [{"reader_max_pending_bytes": 4096}])
async def test_a_slow_reader_loses_its_request_and_no_other(mesh: Mesh) -> None:
    mesh.scheduler.pause_s = 0.002
    frontend = mesh.connect()
    endless = mesh.submit("word " * 9000, is_stream=True, step=8)
    await frontend.submit((1, endless), credit=0)
    await frontend.submit((2, mesh.submit("quick", is_stream=True)))
    await frontend.read_until_over(1, 2)
    end = frontend.answers[1].end
    assert end is not None
    assert end.failed.reason == FailureReason.SLOW_READER
    assert content_of(frontend.answers[2].data) == "quick"
    await mesh.until(lambda: bool(mesh.scheduler.aborts))
    assert mesh.scheduler.aborts[0].reason == 3
    frontend.call.cancel()


async def test_the_load_of_the_scheduler_is_relayed(mesh: Mesh) -> None:
    frontend = mesh.connect()
    await frontend.read_until(lambda: frontend.load is not None)
    assert frontend.load is not None
    assert (frontend.load.num_running, frontend.load.max_model_len) == (7, 100)
    frontend.call.cancel()


async def generate(mesh: Mesh, request: Any, **options: Any) -> list[Any]:
    call = mesh.stub.Generate(
        detokenizer_pb2.DetokenizerServiceGenerateRequest(submit=request), **options
    )
    async with asyncio.timeout(LIMIT_S):
        return [message async for message in call]


async def test_generate_gives_text_events(mesh: Mesh) -> None:
    request = mesh.submit(
        "R</think>C" + CALL, starts_in_reasoning=True, tools=[TOOL], tool_choice=2
    )
    parts = await generate(mesh, request)
    deltas = [part.delta for part in parts if part.WhichOneof("part") == "delta"]
    assert "".join(delta.reasoning for delta in deltas) == "R"
    assert "".join(delta.content for delta in deltas) == "C"
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert pieces[0].name == "f"
    assert pieces[0].id
    assert "".join(piece.arguments for piece in pieces) == '{"n": 12}'
    end = next(part.sequence_end for part in parts if part.WhichOneof("part") == "sequence_end")
    assert end.finish_reason == "tool_calls"
    assert parts[-1].WhichOneof("part") == "finished"
    count = sum(len(delta.token_ids) // 4 for delta in deltas)
    assert parts[-1].finished.stats.num_output_tokens == count


@pytest.mark.parametrize("kind", ["RESPONSE", "MESSAGE", "TOKENS"])
async def test_generate_gives_text_whatever_object_is_meant(mesh: Mesh, kind: str) -> None:
    request = mesh.submit("Hello", include_text=True)
    request.output.object_kind = detokenizer_pb2.ObjectKind.Value(f"OBJECT_KIND_{kind}")
    parts = await generate(mesh, request)
    assert "".join(part.delta.content for part in parts) == "Hello"


async def test_generate_makes_ids_of_its_own(mesh: Mesh) -> None:
    request = mesh.submit("a")
    await asyncio.gather(generate(mesh, request), generate(mesh, request))
    first, second = (submit.request_id for submit in mesh.scheduler.submits)
    assert first != second
    assert first.startswith("chatcmpl-1-")


async def test_generate_refuses_with_the_status_of_the_reason(mesh: Mesh) -> None:
    request = mesh.submit("a")
    request.sequences[0].prompt_token_ids = b"\xff\xff\xff\x00"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(mesh, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(caught.value).field == "sequences.[0].prompt_token_ids"


async def test_cancelling_generate_aborts_and_its_deadline_goes_on(mesh: Mesh) -> None:
    mesh.scheduler.pause_s = 0.005
    request = mesh.submit("x " * 2000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(mesh, request, timeout=2.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await mesh.until(lambda: not mesh.scheduler.running)
    assert 0 < mesh.scheduler.submits[0].timeout_ms <= 2000


async def test_abort_by_label_ends_both_kinds_and_is_idempotent(mesh: Mesh) -> None:
    mesh.scheduler.pause_s = 0.005
    frontend = mesh.connect()
    request = mesh.submit("x " * 2000, is_stream=True)
    await frontend.submit((1, request))
    running = asyncio.create_task(generate(mesh, request))
    await mesh.until(lambda: len(mesh.scheduler.running) == 2)
    abort = detokenizer_pb2.DetokenizerServiceAbortRequest(request_id="chatcmpl-1")
    assert (await mesh.stub.Abort(abort, timeout=30)).num_aborted == 2
    assert (await mesh.stub.Abort(abort, timeout=30)).num_aborted == 0
    parts = await running
    assert parts[-1].failed.reason == FailureReason.CANCELLED
    await frontend.read_until_over(1)
    frontend.call.cancel()


async def test_a_reset_of_the_prefix_caches_is_passed_on(mesh: Mesh) -> None:
    frontend = mesh.connect()
    # An answer says that the scheduler is connected.
    await frontend.submit((1, mesh.submit("a", is_stream=True)))
    await frontend.read_until_over(1)
    request = detokenizer_pb2.DetokenizerServiceResetCacheRequest()
    assert (await mesh.stub.ResetCache(request, timeout=30)).num_blocks == 5
    assert mesh.scheduler.num_resets == 1
    frontend.call.cancel()


class StuckContext:
    """A call whose peer reads nothing."""

    def __init__(self, request: Any) -> None:
        self.request = request

    async def read(self) -> Any:
        if self.request is not None:
            request, self.request = self.request, None
            return request
        await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        await asyncio.Event().wait()

    def time_remaining(self) -> None:
        return None


def stuck_servicer(upstream: FakeUpstream) -> DetokenizerServicer:
    settings = DoorSettings(limits=ReaderLimits(), peer_stall_s=0.05)
    return DetokenizerServicer(CONTEXT, upstream, LiveRequests(), settings)


def small_request() -> detokenizer_pb2.TextSubmit:
    return detokenizer_pb2.TextSubmit(
        request_id="r",
        sequences=[common_pb2.SequenceSpec(prompt_token_ids=pack_ids([1]))],
        sampling=common_pb2.SamplingParams(max_tokens=1),
        output=detokenizer_pb2.OutputSpec(object_kind=1, is_stream=True),
    )


async def test_a_frontend_that_reads_nothing_is_cut_and_its_requests_aborted() -> None:
    upstream = FakeUpstream()
    submit = detokenizer_pb2.ConnectSubmit(stream_id=1, submit=small_request())
    context = StuckContext(detokenizer_pb2.DetokenizerServiceConnectRequest(submits=[submit]))
    serving = asyncio.ensure_future(stuck_servicer(upstream).Connect(None, context))
    async with asyncio.timeout(LIMIT_S):
        while not upstream.listeners:  # noqa: ASYNC110  # a fake's list
            await asyncio.sleep(0)
        upstream.listeners[0].on_verdict(0, None)
        with pytest.raises(RequestError) as caught:
            await serving
    assert caught.value.reason is FailureReason.SLOW_READER
    assert upstream.aborts


async def test_a_stuck_reader_of_generate_is_cut_too() -> None:
    upstream = FakeUpstream()
    request = detokenizer_pb2.DetokenizerServiceGenerateRequest(submit=small_request())
    serving = asyncio.ensure_future(stuck_servicer(upstream).Generate(request, StuckContext(None)))
    async with asyncio.timeout(LIMIT_S):
        while not upstream.listeners:  # noqa: ASYNC110  # a fake's list
            await asyncio.sleep(0)
        upstream.listeners[0].on_verdict(0, None)
        upstream.listeners[0].on_tokens(0, 0, ids("a"), None)
        with pytest.raises(RequestError) as caught:
            await serving
    assert caught.value.reason is FailureReason.SLOW_READER
    assert upstream.aborts


def test_large_frames_go_in_several_messages_with_the_end_in_the_last() -> None:
    data = b"x" * (2 * MAX_FRAME_BYTES + 5)
    outgoing = Outgoing(
        verdicts=[(1, None), (2, RequestError(FailureReason.QUEUE_FULL, "full"))],
        frames=[(3, b"abc"), (1, data), (4, b"def")],
        ends=[(1, TextFinished(stats=SequenceStats(), reason=1))],  # type: ignore[arg-type]  # STOP
    )
    messages = list(outgoing_to_proto(outgoing))
    assert [len(message.verdicts) for message in messages] == [2, *[0] * (len(messages) - 1)]
    assert [len(message.ends) for message in messages] == [*[0] * (len(messages) - 1), 1]
    received: dict[int, bytes] = {}
    for message in messages:
        start = 0
        assert len(set(message.frames.stream_ids)) == len(message.frames.stream_ids)
        assert len(message.frames.data) <= MAX_FRAME_BYTES
        for stream_id, size in zip(
            message.frames.stream_ids, message.frames.num_bytes, strict=True
        ):
            piece = message.frames.data[start : start + size]
            received[stream_id] = received.get(stream_id, b"") + piece
            start += size
    assert received == {3: b"abc", 1: data, 4: b"def"}


def test_nothing_to_say_is_no_message() -> None:
    assert list(outgoing_to_proto(Outgoing())) == []


def test_a_request_that_cannot_be_read_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(message: detokenizer_pb2.TextSubmit) -> str:
        if message.request_id == "bad":
            raise OverflowError("inside")
        return "read"

    monkeypatch.setattr(server, "submit_from_proto", read)
    request = detokenizer_pb2.DetokenizerServiceConnectRequest()
    for stream_id, label in enumerate(("good", "bad")):
        request.submits.add(stream_id=stream_id).submit.request_id = label
    good, bad = server.incoming_from_proto(request).submits
    assert good.submit == "read"
    assert isinstance(bad.submit, RequestError)
    assert bad.submit.reason is FailureReason.INTERNAL


async def test_a_frontend_is_promised_signs_of_life_and_gets_them(mesh: Mesh) -> None:
    call = mesh.stub.Connect()
    async with asyncio.timeout(LIMIT_S):
        assert (await call.read()).sign_interval_ms == SIGN_INTERVAL_MS
        # Nothing happens, and still it speaks.
        for _ in range(2):
            assert (await call.read()).sign_interval_ms == 0
    call.cancel()
