"""A detokenizer that does as told, over the real contract on a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from protos.glm.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from shared import rpc

PIECES = ("Hel", "lo ", "wor", "ld")
TEXT = "".join(PIECES)


@dataclass
class Behaviour:
    """What happens to the next requests."""

    pieces: tuple[str, ...] = PIECES
    refusal: common_pb2.Failure | None = None
    gives_verdict: bool = True
    failure_after: int | None = None
    failure: common_pb2.Failure = field(
        default_factory=lambda: common_pb2.Failure(
            reason=common_pb2.FAILURE_REASON_UPSTREAM_LOST, message="scheduler lost"
        )
    )
    silent_after: int | None = None
    pause_s: float = 0.0
    oddities: detokenizer_pb2.OutputOddities | None = None
    delay_s: float = 0.0
    # Nothing comes behind the verdict before it is set.
    may_go_on: asyncio.Event | None = None


class FakeDetokenizer(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """Answers every submit by its behaviour and keeps what it was told."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.behaviour = Behaviour()
        self.submits: list[detokenizer_pb2.ConnectSubmit] = []
        self.aborted: list[int] = []
        self.credits: dict[int, int] = {}
        self.credit_messages = 0
        self.aborted_request_ids: list[str] = []
        self.connections = 0
        self.num_resets = 0
        self.load = common_pb2.LoadSnapshot(
            is_worker_ready=True, max_model_len=8192, num_running=3, num_waiting=2,
            num_preemptions_total=7,
            num_free_blocks=75, num_total_blocks=100,
            num_recomputed_tokens_total=90, step_us_total=4_000_000, step_idle_us_total=250_000,
            gc_pause_us_total=1500, max_gc_pause_us=500,
            num_cached_blocks=60, num_prefix_cache_queries_total=400,
            num_prefix_cache_hits_total=300,
        )  # fmt: skip
        self.is_draining = False
        # Promised, and not kept: a test that wants signs of life sends them.
        self.sign_interval_ms = 0
        self._outboxes: set[asyncio.Queue] = set()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = rpc.build_server(address=self.address)
        detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(self, self._server)
        await self._server.start()

    async def stop(self) -> None:
        """As if killed; another start is another process."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
            self.is_draining = False

    def drain(self) -> None:
        """Refuse what is new from now on."""
        self.is_draining = True
        for outbox in self._outboxes:
            outbox.put_nowait(detokenizer_pb2.DetokenizerServiceConnectResponse())

    def say(self, **message: object) -> None:
        """To every frontend."""
        for outbox in self._outboxes:
            outbox.put_nowait(detokenizer_pb2.DetokenizerServiceConnectResponse(**message))

    async def wait_until(self, is_so) -> None:  # noqa: ANN001
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(is_so)

    async def Connect(self, requests: AsyncIterator, context: grpc.aio.ServicerContext) -> None:
        self.connections += 1
        outbox: asyncio.Queue = asyncio.Queue()
        outbox.put_nowait(
            detokenizer_pb2.DetokenizerServiceConnectResponse(
                load=self.load, sign_interval_ms=self.sign_interval_ms
            )
        )
        self._outboxes.add(outbox)
        tasks: dict[int, asyncio.Task] = {}
        reader = asyncio.create_task(self._read(requests, outbox, tasks))
        try:
            while True:
                message = await outbox.get()
                message.is_draining = self.is_draining
                await context.write(message)
        finally:
            self._outboxes.discard(outbox)
            reader.cancel()
            for task in tasks.values():
                task.cancel()

    async def ResetCache(
        self, request: detokenizer_pb2.DetokenizerServiceResetCacheRequest, context: object
    ) -> detokenizer_pb2.DetokenizerServiceResetCacheResponse:
        self.num_resets += 1
        return detokenizer_pb2.DetokenizerServiceResetCacheResponse(num_blocks=12)

    async def Abort(
        self, request: detokenizer_pb2.DetokenizerServiceAbortRequest, context: object
    ) -> detokenizer_pb2.DetokenizerServiceAbortResponse:
        return await self.abort(request, context)

    async def abort(
        self, request: detokenizer_pb2.DetokenizerServiceAbortRequest, context: object
    ) -> detokenizer_pb2.DetokenizerServiceAbortResponse:
        self.aborted_request_ids.append(request.request_id)
        known = {submit.submit.request_id for submit in self.submits}
        return detokenizer_pb2.DetokenizerServiceAbortResponse(
            num_aborted=int(request.request_id in known)
        )

    async def _read(
        self, requests: AsyncIterator, outbox: asyncio.Queue, tasks: dict[int, asyncio.Task]
    ) -> None:
        async for request in requests:
            async with self._changed:
                for submit in request.submits:
                    self.submits.append(submit)
                    tasks[submit.stream_id] = asyncio.create_task(self._serve(submit, outbox))
                for stream_id in request.aborted_stream_ids:
                    self.aborted.append(stream_id)
                    tasks[stream_id].cancel()
                    cancelled = common_pb2.Failure(reason=common_pb2.FAILURE_REASON_CANCELLED)
                    outbox.put_nowait(_end(stream_id, failed=cancelled))
                if request.HasField("credits"):
                    self.credit_messages += 1
                    columns = request.credits
                    for stream_id, size in zip(columns.stream_ids, columns.num_bytes, strict=True):
                        self.credits[stream_id] = self.credits.get(stream_id, 0) + size
                self._changed.notify_all()

    async def _serve(self, submit: detokenizer_pb2.ConnectSubmit, outbox: asyncio.Queue) -> None:
        plan, stream_id = self.behaviour, submit.stream_id
        if not plan.gives_verdict:
            return
        verdict = detokenizer_pb2.TextVerdict(stream_id=stream_id, refusal=plan.refusal)
        outbox.put_nowait(detokenizer_pb2.DetokenizerServiceConnectResponse(verdicts=[verdict]))
        if plan.refusal is not None:
            return
        await asyncio.sleep(plan.delay_s)
        if plan.may_go_on is not None:
            await plan.may_go_on.wait()
        frames = frames_of(submit.submit, plan.pieces)
        for position, frame in enumerate(frames):
            if plan.failure_after == position:
                outbox.put_nowait(_end(stream_id, failed=plan.failure))
                return
            if plan.silent_after == position:
                return
            if plan.pause_s:
                await asyncio.sleep(plan.pause_s)
            outbox.put_nowait(_frame(stream_id, frame))
        stats = common_pb2.SequenceStats(
            num_prompt_tokens=len(submit.submit.sequences[0].prompt_token_ids) // 4,
            num_output_tokens=len(plan.pieces),
        )
        finished = detokenizer_pb2.TextFinished(
            stats=stats, reason=common_pb2.FINISH_REASON_STOP, oddities=plan.oddities
        )
        if submit.submit.output.keep_object:
            finished.object_json = response_of(submit.submit, plan.pieces)
        outbox.put_nowait(_end(stream_id, finished=finished))


def frames_of(submit: detokenizer_pb2.TextSubmit, pieces: tuple[str, ...]) -> list[bytes]:
    """What a real detokenizer would send, simplified."""
    output = submit.output
    if output.object_kind == detokenizer_pb2.OBJECT_KIND_RESPONSE:
        return _response_frames(submit, pieces)
    if output.object_kind == detokenizer_pb2.OBJECT_KIND_MESSAGE:
        return _message_frames(submit, pieces)
    is_chat = output.object_kind == detokenizer_pb2.OBJECT_KIND_CHAT_COMPLETION
    head = {"id": output.response_id, "model": output.model, "created": output.created_s}
    num_prompt = len(submit.sequences[0].prompt_token_ids) // 4
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": len(pieces),
        "total_tokens": num_prompt + len(pieces),
    }
    if not output.is_stream:
        choices = [_whole_choice(s.index, "".join(pieces), is_chat) for s in submit.sequences]
        kind = "chat.completion" if is_chat else "text_completion"
        if output.object_kind == detokenizer_pb2.OBJECT_KIND_TOKENS:
            kind = "generate"
            choices = [{**choice, "token_ids": [1], "stop_reason": None} for choice in choices]
        return [json.dumps({**head, "object": kind, "choices": choices, "usage": usage}).encode()]
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    frames = [
        _event({**head, "object": kind, "choices": [_delta(sequence.index, piece, is_chat)]})
        for piece in pieces
        for sequence in submit.sequences
    ]
    frames += [
        _event({**head, "object": kind, "choices": [_delta(s.index, "", is_chat, "stop")]})
        for s in submit.sequences
    ]
    if output.include_usage:
        frames.append(_event({**head, "object": kind, "choices": [], "usage": usage}))
    return [*frames, b"data: [DONE]\n\n"]


def response_of(submit: detokenizer_pb2.TextSubmit, pieces: tuple[str, ...]) -> bytes:
    """A response with one message."""
    output = submit.output
    part = {"type": "output_text", "text": "".join(pieces), "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    shown = {
        "id": output.response_id,
        "object": "response",
        "created_at": output.created_s,
        "model": output.model,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [{**message, "content": [part]}],
        "usage": None,
    }
    return json.dumps(shown | json.loads(output.echo_json)).encode()


def _response_frames(submit: detokenizer_pb2.TextSubmit, pieces: tuple[str, ...]) -> list[bytes]:
    if not submit.output.is_stream:
        return [response_of(submit, pieces)]
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    deltas = [
        {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []}
        for piece in pieces
    ]
    last = {"type": "response.completed", "response": json.loads(response_of(submit, pieces))}
    return [_named({**event, "sequence_number": i}) for i, event in enumerate([*deltas, last])]


def _message_frames(submit: detokenizer_pb2.TextSubmit, pieces: tuple[str, ...]) -> list[bytes]:
    output = submit.output
    head = {"id": output.response_id, "type": "message", "role": "assistant"}
    head |= {"model": output.model, "stop_sequence": None}
    usage = {"input_tokens": 1, "output_tokens": len(pieces)}
    usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    if not output.is_stream:
        block = {"type": "text", "text": "".join(pieces)}
        whole = {**head, "content": [block], "stop_reason": "end_turn", "usage": usage}
        return [json.dumps(whole).encode()]
    start = {**head, "content": [], "stop_reason": None, "usage": usage}
    return [
        _named({"type": "message_start", "message": start}),
        _named({"type": "content_block_start", "index": 0,
                "content_block": {"type": "text", "text": ""}}),
        *(
            _named({"type": "content_block_delta", "index": 0,
                    "delta": {"type": "text_delta", "text": piece}})
            for piece in pieces
        ),
        _named({"type": "content_block_stop", "index": 0}),
        _named({"type": "message_delta", "usage": usage,
                "delta": {"stop_reason": "end_turn", "stop_sequence": None}}),
        _named({"type": "message_stop"}),
    ]  # fmt: skip


def _named(document: dict) -> bytes:
    return f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode()


def _whole_choice(index: int, text: str, is_chat: bool) -> dict:
    shown = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"index": index, **shown, "logprobs": None, "finish_reason": "stop"}


def _delta(index: int, text: str, is_chat: bool, finish: str | None = None) -> dict:
    shown = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": index, **shown, "logprobs": None, "finish_reason": finish}


def _event(document: dict) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def _frame(stream_id: int, data: bytes) -> detokenizer_pb2.DetokenizerServiceConnectResponse:
    columns = detokenizer_pb2.FrameColumns(stream_ids=[stream_id], num_bytes=[len(data)], data=data)
    return detokenizer_pb2.DetokenizerServiceConnectResponse(frames=columns)


def _end(stream_id: int, **end: object) -> detokenizer_pb2.DetokenizerServiceConnectResponse:
    return detokenizer_pb2.DetokenizerServiceConnectResponse(
        ends=[detokenizer_pb2.TextEnd(stream_id=stream_id, **end)]
    )
