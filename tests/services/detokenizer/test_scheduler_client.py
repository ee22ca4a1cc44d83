import json
from typing import Any

import pytest

from protos.glm.v1 import common_pb2, scheduler_pb2
from services.detokenizer.scheduler_client import MAX_SUBMIT_BYTES, SchedulerClient
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.wire import pack_ids
from tests.services.detokenizer.conftest import Mesh
from tests.services.detokenizer.fake_scheduler import FakeScheduler, Response, ended
from tests.services.detokenizer.frames import FakeUpstream, submit
from tests.services.detokenizer.test_server import content_of


def tokens(stream_id: int, previous: int, ids: list[int]) -> scheduler_pb2.TokenColumns:
    return scheduler_pb2.TokenColumns(
        stream_ids=[stream_id],
        num_previous_tokens=[previous],
        num_tokens=[len(ids)],
        token_ids=pack_ids(ids),
    )


async def manual(mesh: Mesh, **fields: Any) -> tuple[Any, int]:
    """A frontend with request 1, admitted by hand; its stream id upstream."""
    mesh.scheduler.is_manual = True
    frontend = mesh.connect()
    await frontend.submit((1, mesh.submit("x", is_stream=True, **fields)))
    await mesh.until(lambda: bool(mesh.scheduler.submits))
    stream_id = mesh.scheduler.submits[0].sequences[0].stream_id
    mesh.scheduler.send(Response(verdicts=[scheduler_pb2.Verdict(stream_id=stream_id)]))
    return frontend, stream_id


async def test_a_lost_scheduler_is_told_to_every_live_sequence_at_once(mesh: Mesh) -> None:
    frontend, _ = await manual(mesh)
    lost: list[int] = []
    (peer,) = mesh.schedulers.peers
    listener = FakeUpstream()
    listener.on_lost = lost.append  # type: ignore[attr-defined]  # all that is told here
    ids = peer.client.submit(_tokens(submit(3)), listener)  # type: ignore[arg-type]  # as above
    peer.client.abort(ids[1], AbortReason.CANCELLED)
    await mesh.scheduler_server.stop(0)
    await mesh.until(lambda: lost == [0, 2])
    assert peer.client.num_open == 0
    frontend.call.cancel()


async def test_while_there_is_no_scheduler_requests_are_refused_and_then_served_again(
    mesh: Mesh,
) -> None:
    await mesh.scheduler_server.stop(0)
    frontend = mesh.connect()
    verdict = None
    stream_id = 0
    while verdict is None or not verdict.HasField("refusal"):
        stream_id += 1
        await frontend.submit((stream_id, mesh.submit("a", is_stream=True)))
        await frontend.read_until_over(stream_id)
        verdict = frontend.answers[stream_id].verdict
    assert verdict.refusal.reason == FailureReason.UPSTREAM_LOST
    assert verdict.refusal.retry_after_ms
    await mesh.start_scheduler()
    await mesh.until_connected(2)
    await frontend.submit((1000, mesh.submit("again", is_stream=True)))
    await frontend.read_until_over(1000)
    assert content_of(frontend.answers[1000].data) == "again"
    frontend.call.cancel()


async def test_a_refusal_by_the_scheduler_is_the_verdict(mesh: Mesh) -> None:
    mesh.scheduler.is_manual = True
    frontend = mesh.connect()
    await frontend.submit((1, mesh.submit("x", num_sequences=2)))
    await mesh.until(lambda: bool(mesh.scheduler.submits))
    first, second = (s.stream_id for s in mesh.scheduler.submits[0].sequences)
    refusal = common_pb2.Failure(reason=5, message="full", retry_after_ms=250)
    mesh.scheduler.send(
        Response(
            verdicts=[
                scheduler_pb2.Verdict(stream_id=first),
                scheduler_pb2.Verdict(stream_id=second, refusal=refusal),
            ]
        )
    )
    await frontend.read_until_over(1)
    verdict = frontend.answers[1].verdict
    assert verdict is not None
    assert (verdict.refusal.reason, verdict.refusal.retry_after_ms) == (5, 250)
    await mesh.until(lambda: [a.stream_id for a in mesh.scheduler.aborts] == [first])
    frontend.call.cancel()


async def test_the_end_of_an_aborted_sequence_is_swallowed(mesh: Mesh) -> None:
    frontend, stream_id = await manual(mesh, stop=["b"])
    ids = mesh.dialect.encode("abc", allow_control=False)
    mesh.scheduler.send(Response(tokens=tokens(stream_id, 0, ids)))
    await frontend.read_until_over(1)
    mesh.scheduler.send(Response(tokens=tokens(stream_id, len(ids), ids)))
    mesh.scheduler.send(Response(ends=[ended(stream_id, reason=1)]))
    mesh.scheduler.is_manual = False
    await frontend.submit((2, mesh.submit("fine", is_stream=True)))
    await frontend.read_until_over(2)
    assert content_of(frontend.answers[1].data) == "a"
    assert content_of(frontend.answers[2].data) == "fine"
    frontend.call.cancel()


async def test_a_failed_sequence_keeps_its_reason(mesh: Mesh) -> None:
    frontend, stream_id = await manual(mesh)
    failed = common_pb2.Failure(reason=13, message="not finite")
    mesh.scheduler.send(
        Response(ends=[scheduler_pb2.SequenceEnd(stream_id=stream_id, failed=failed)])
    )
    await frontend.read_until_over(1)
    end = frontend.answers[1].end
    assert end is not None
    assert (end.failed.reason, end.failed.message) == (13, "not finite")
    frontend.call.cancel()


async def test_an_unknown_finish_reason_is_a_failure(mesh: Mesh) -> None:
    frontend, stream_id = await manual(mesh)
    mesh.scheduler.send(Response(ends=[ended(stream_id, reason=77)]))
    await frontend.read_until_over(1)
    end = frontend.answers[1].end
    assert end is not None
    assert end.failed.reason == FailureReason.INTERNAL
    frontend.call.cancel()


async def test_usage_of_a_stop_string_tells_cached_tokens_and_drafts(mesh: Mesh) -> None:
    """The end is made here: what the scheduler's own end says comes too late."""
    frontend, stream_id = await manual(mesh, stop=("c",), include_usage=True)
    columns = tokens(stream_id, 0, mesh.dialect.encode("abcd", allow_control=False))
    columns.starts.add(stream_id=stream_id, stats=common_pb2.SequenceStats(num_cached_tokens=1))
    columns.num_drafted_tokens.append(5)
    columns.num_accepted_tokens.append(3)
    mesh.scheduler.send(Response(tokens=columns))
    await frontend.read_until_over(1)
    usage = json.loads(frontend.answers[1].data.split(b"data: ")[-2])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 3
    assert details["rejected_prediction_tokens"] == 2
    frontend.call.cancel()


@pytest.mark.parametrize("broken", ["columns", "ids", "logprobs", "drafts"])
async def test_a_scheduler_that_breaks_the_contract_is_left_and_reached_again(
    mesh: Mesh, broken: str
) -> None:
    sampling = {"num_logprobs": 0} if broken == "logprobs" else {}
    frontend, stream_id = await manual(mesh, sampling=sampling, include_logprobs=bool(sampling))
    columns = tokens(stream_id, 0, [1, 2])
    if broken == "columns":
        columns.num_previous_tokens.append(3)
    elif broken == "ids":
        columns.token_ids = columns.token_ids[:-4]
    elif broken == "drafts":
        columns.num_accepted_tokens.append(1)
    mesh.scheduler.send(Response(tokens=columns))
    await mesh.until_connected(2)
    # The request goes on there, and keeps the number of its losses.
    await mesh.until(lambda: len(mesh.scheduler.submits) == 2)
    assert mesh.scheduler.submits[1].request_id == "chatcmpl-1~1"
    frontend.call.cancel()


async def test_logprobs_reach_the_sequences_that_asked_for_them(mesh: Mesh) -> None:
    frontend = mesh.connect()
    await frontend.submit(
        (1, mesh.submit("abc", is_stream=False)),
        (2, mesh.submit("abc", sampling={"num_logprobs": 0}, include_logprobs=True)),
        (3, mesh.submit("abcd", is_stream=False)),
    )
    await frontend.read_until_over(1, 2, 3)
    without = json.loads(frontend.answers[1].data)["choices"][0]
    shown = json.loads(frontend.answers[2].data)["choices"][0]["logprobs"]["content"]
    assert without["logprobs"] is None
    assert "".join(entry["token"] for entry in shown) == "abc<|endoftext|>"
    assert all(entry["logprob"] == -0.5 for entry in shown)
    frontend.call.cancel()


async def test_ids_of_open_sequences_are_never_reused() -> None:
    client = SchedulerClient("unix:/none", on_state=lambda _: None, on_load=lambda _: None)
    client._link.channel = object()  # type: ignore[assignment]  # as if connected, never used
    upstream = FakeUpstream()
    client._ids._last = (1 << 32) - 3
    request = submit(4)
    ids = client.submit(_tokens(request), upstream)  # type: ignore[arg-type]  # never told
    client._ids._last = (1 << 32) - 3
    again = client.submit(_tokens(request), upstream)  # type: ignore[arg-type]  # never told
    assert len({*ids, *again}) == 8
    assert all(0 <= i < 1 << 32 for i in (*ids, *again))
    client.abort(ids[0], AbortReason.CANCELLED)
    client.abort(ids[0], AbortReason.CANCELLED)
    assert len(client._aborts) == 1
    assert client.num_open == 8


async def test_what_is_too_large_for_a_message_is_refused() -> None:
    client = SchedulerClient("unix:/none", on_state=lambda _: None, on_load=lambda _: None)
    client._link.channel = object()  # type: ignore[assignment]  # as if connected, never used
    request = submit()
    huge = request.sequences[0].__class__(index=0, prompt_token_ids=bytes(MAX_SUBMIT_BYTES + 4))
    with pytest.raises(RequestError) as caught:
        client.submit(_tokens(request, huge), FakeUpstream())  # type: ignore[arg-type]  # never told
    assert caught.value.reason is FailureReason.INVALID_ARGUMENT
    assert client.num_open == 0


def _tokens(request: Any, *sequences: Any) -> Any:
    from services.detokenizer.messages import TokenSubmit

    return TokenSubmit(
        request_id="r", sequences=sequences or request.sequences, sampling=request.sampling
    )


def test_the_fake_is_a_scheduler() -> None:
    assert FakeScheduler().num_connections == 0
