"""The gRPC door of the detokenizer: `Connect` for frontends, `Generate` and `Abort` for others.

Messages of glm.v1 stop here; behind this door there are sessions and responses.
"""

import asyncio
import time
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from protos.glm.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from services.detokenizer.build import BuildContext, build_response, upstream_submit
from services.detokenizer.delivery import ReaderLimits
from services.detokenizer.events import DeltaEvent, Event, EventWriter, SequenceEndEvent
from services.detokenizer.faults import internal_error
from services.detokenizer.live import LiveRequests
from services.detokenizer.messages import (
    ObjectKind,
    OutputSpec,
    SequenceSpec,
    TextEnd,
    TextSubmit,
    ToolChoice,
    ToolSpec,
    label_of,
)
from services.detokenizer.ports import Upstream
from services.detokenizer.reading import check_token_ids, parse_members, parse_schema
from services.detokenizer.session import (
    SIGN_INTERVAL_S,
    Incoming,
    Outgoing,
    Session,
    StreamSubmit,
)
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.rpc import Server
from shared.sampling import LoadSnapshot
from shared.wire import (
    check_columns,
    failure_to_proto,
    load_to_proto,
    pack_ids,
    replay_from_proto,
    sampling_from_proto,
    stats_to_proto,
)

SERVICE_NAME: Final = detokenizer_pb2.DESCRIPTOR.services_by_name["DetokenizerService"].full_name
# Frontends take messages of 16 MiB; what is larger goes in several.
MAX_FRAME_BYTES: Final = 8 << 20
TICK_S: Final = 0.25
SIGN_INTERVAL_MS: Final = int((SIGN_INTERVAL_S + TICK_S) * 1000)
_OBJECT_KINDS: Final = frozenset(map(int, ObjectKind))
_TOOL_CHOICES: Final = frozenset(map(int, ToolChoice))

_logger = get_logger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext
ConnectRequest: TypeAlias = detokenizer_pb2.DetokenizerServiceConnectRequest
ConnectResponse: TypeAlias = detokenizer_pb2.DetokenizerServiceConnectResponse
GenerateResponse: TypeAlias = detokenizer_pb2.DetokenizerServiceGenerateResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """How readers are treated; `peer_stall_s` bounds one write."""

    limits: ReaderLimits
    peer_stall_s: float = 5.0


class DetokenizerServicer(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """Serves `DetokenizerService`."""

    def __init__(
        self,
        context: BuildContext,
        upstream: Upstream,
        live: LiveRequests,
        settings: DoorSettings,
    ) -> None:
        """Keep what all calls share."""
        self._context = context
        self._upstream = upstream
        self._live = live
        self._settings = settings
        self._sessions: set[Session] = set()
        self._writers: set[EventWriter] = set()
        self._load: LoadSnapshot | None = None

    def add_to(self, server: Server) -> None:
        """Register with a server."""
        detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(self, server)

    def show_load(self, load: LoadSnapshot) -> None:
        """Relay the scheduler's snapshot to every frontend."""
        self._load = load
        for session in self._sessions:
            session.show_load(load)

    def show_drain(self) -> None:
        """Tell every frontend that no new request is taken any more."""
        for session in self._sessions:
            session.show_drain()

    async def keep_ticking(self) -> None:
        """Look at the clock for all requests, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for session in list(self._sessions):
                session.tick(now)
            for writer in list(self._writers):
                writer.tick(now)

    async def Connect(self, request_iterator: object, context: Context) -> None:
        """Serve one frontend until its stream ends; its requests end with it."""
        wake = asyncio.Event()
        session = Session(
            self._context, self._upstream, self._live, self._settings.limits, wake.set
        )
        self._sessions.add(session)
        if self._load is not None:
            session.show_load(self._load)
        if self._live.is_draining:
            session.show_drain()
        try:
            await _until_first_ends(
                self._read(session, context), self._write(session, context, wake)
            )
        finally:
            self._sessions.discard(session)
            session.close()

    async def Generate(
        self, request: detokenizer_pb2.DetokenizerServiceGenerateRequest, context: Context
    ) -> None:
        """Serve one request as text events."""
        submit = submit_from_proto(request.submit)
        for sequence in submit.sequences:
            field = f"sequences.[{sequence.index}].prompt_token_ids"
            check_token_ids(sequence.prompt_token_ids, field, len(self._context.vocabulary))
        self._live.check_open()
        submit = _within(submit, context)
        output = replace(submit.output, return_token_ids=True)
        if output.object_kind.is_ordered:  # no object is written here, and events tell their kind
            output = replace(output, object_kind=ObjectKind.CHAT_COMPLETION)
        submit = replace(submit, output=output)
        response = build_response(submit, self._context, time.monotonic())
        writer = EventWriter(response, submit.output, self._settings.limits)
        changed = asyncio.Event()
        response.on_change = changed.set
        self._writers.add(writer)
        self._live.add(response)
        try:
            # The caller's id is a label; the first service a request reaches makes its own.
            internal_id = f"{label_of(submit.request_id)}-{uuid.uuid4().hex[:12]}"
            sent = upstream_submit(submit, response, self._context, internal_id)
            response.start(self._upstream, sent)
            await self._write_events(writer, context, changed)
        finally:
            self._writers.discard(writer)
            self._live.discard(response)
            response.abort(RequestError(FailureReason.CANCELLED, "the caller went away"))

    async def Abort(
        self, request: detokenizer_pb2.DetokenizerServiceAbortRequest, context: Context
    ) -> detokenizer_pb2.DetokenizerServiceAbortResponse:
        """End requests by their label."""
        num_aborted = self._live.abort(request.request_id)
        return detokenizer_pb2.DetokenizerServiceAbortResponse(num_aborted=num_aborted)

    async def ResetCache(
        self, request: detokenizer_pb2.DetokenizerServiceResetCacheRequest, context: Context
    ) -> detokenizer_pb2.DetokenizerServiceResetCacheResponse:
        """Pass a reset of the prefix caches on."""
        num_blocks = await self._upstream.reset_cache()
        return detokenizer_pb2.DetokenizerServiceResetCacheResponse(num_blocks=num_blocks)

    async def _read(self, session: Session, context: Context) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            session.handle(incoming_from_proto(request), time.monotonic())

    async def _write(self, session: Session, context: Context, wake: asyncio.Event) -> None:
        while True:
            await wake.wait()
            wake.clear()
            for message in outgoing_to_proto(session.collect(time.monotonic())):
                await self._write_in_time(context, message)

    async def _write_in_time(self, context: Context, message: object) -> None:
        """Write, or give the peer up: a call whose reader is stuck must not last for ever."""
        try:
            async with asyncio.timeout(self._settings.peer_stall_s):
                await context.write(message)
        except TimeoutError:
            _logger.warning("peer reads nothing, cut off")
            raise RequestError(FailureReason.SLOW_READER, "the reader reads nothing") from None

    async def _write_events(
        self, writer: EventWriter, context: Context, changed: asyncio.Event
    ) -> None:
        response = writer.response
        while True:
            await changed.wait()
            changed.clear()
            if response.refusal is not None:
                raise response.refusal
            events = writer.collect()
            for event in events:
                writer.stalled_since = time.monotonic()
                await self._write_in_time(context, event_to_proto(event))
            writer.stalled_since = None
            if events and not isinstance(events[-1], (DeltaEvent, SequenceEndEvent)):
                return


async def _until_first_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one returns or raises; the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def incoming_from_proto(message: ConnectRequest) -> Incoming:
    """A message of a frontend; a request that cannot be read is refused alone."""
    credits = message.credits
    check_columns(len(credits.stream_ids), num_bytes=credits.num_bytes)
    return Incoming(
        submits=[_stream_submit(submit) for submit in message.submits],
        aborted_stream_ids=list(message.aborted_stream_ids),
        credits=dict(zip(credits.stream_ids, credits.num_bytes, strict=True)),
    )


def submit_from_proto(message: detokenizer_pb2.TextSubmit) -> TextSubmit:
    """A message as a request; `RequestError` when it holds what cannot be."""
    return TextSubmit(
        request_id=message.request_id,
        sequences=tuple(map(_sequence_from_proto, message.sequences)),
        sampling=sampling_from_proto(message.sampling),
        output=_output_from_proto(message.output),
        traceparent=message.traceparent,
        priority=message.priority,
        timeout_ms=message.timeout_ms,
        cache_salt=message.cache_salt,
        tenant_id=message.tenant_id,
        first_token_timeout_ms=message.first_token_timeout_ms,
        attempt=message.attempt,
    )


def outgoing_to_proto(outgoing: Outgoing) -> Iterator[ConnectResponse]:
    """As few messages as the size limit allows; verdicts come first, ends last."""
    if not outgoing:
        return
    batches: list[detokenizer_pb2.FrameColumns | None] = [*_batches(outgoing.frames)] or [None]
    last = len(batches) - 1
    for number, frames in enumerate(batches):
        yield ConnectResponse(
            verdicts=map(_verdict_to_proto, outgoing.verdicts) if number == 0 else (),
            frames=frames,
            ends=map(_end_to_proto, outgoing.ends) if number == last else (),
            load=load_to_proto(outgoing.load) if outgoing.load and number == 0 else None,
            is_draining=outgoing.is_draining,
            sign_interval_ms=SIGN_INTERVAL_MS if outgoing.is_first and number == 0 else 0,
        )


def event_to_proto(event: Event) -> GenerateResponse:
    """A text event as its message."""
    if isinstance(event, DeltaEvent):
        return GenerateResponse(delta=_delta_to_proto(event))
    if isinstance(event, SequenceEndEvent):
        reason = event.stop_reason
        end = detokenizer_pb2.TextSequenceEnd(
            index=event.index,
            finish_reason=event.finish_reason,
            stop_string=reason if isinstance(reason, str) else None,
            stop_token_id=reason if isinstance(reason, int) else None,
            stats=stats_to_proto(event.stats),
        )
        return GenerateResponse(sequence_end=end)
    if isinstance(event, RequestError):
        return GenerateResponse(failed=failure_to_proto(event))
    return GenerateResponse(finished=_finished_to_proto(event))


def _batches(frames: list[tuple[int, bytes]]) -> Iterator[detokenizer_pb2.FrameColumns]:
    stream_ids: list[int] = []
    pieces: list[bytes] = []
    size = 0
    for stream_id, data in frames:
        for start in range(0, len(data), MAX_FRAME_BYTES):
            piece = data[start : start + MAX_FRAME_BYTES]
            if size + len(piece) > MAX_FRAME_BYTES:
                yield _frame_columns(stream_ids, pieces)
                stream_ids, pieces, size = [], [], 0
            stream_ids.append(stream_id)
            pieces.append(piece)
            size += len(piece)
    if pieces:
        yield _frame_columns(stream_ids, pieces)


def _frame_columns(stream_ids: list[int], pieces: list[bytes]) -> detokenizer_pb2.FrameColumns:
    return detokenizer_pb2.FrameColumns(
        stream_ids=stream_ids, num_bytes=list(map(len, pieces)), data=b"".join(pieces)
    )


def _stream_submit(message: detokenizer_pb2.ConnectSubmit) -> StreamSubmit:
    submit: TextSubmit | RequestError
    try:
        submit = submit_from_proto(message.submit)
    except RequestError as error:
        submit = error
    except Exception as error:  # noqa: BLE001  # one request may fail, the others may not
        submit = internal_error(error, message.submit.request_id)
    return StreamSubmit(
        stream_id=message.stream_id,
        submit=submit,
        initial_credit_bytes=message.initial_credit_bytes,
    )


def _sequence_from_proto(message: common_pb2.SequenceSpec) -> SequenceSpec:
    return SequenceSpec(
        index=message.index,
        prompt_token_ids=message.prompt_token_ids,
        output_token_ids=message.output_token_ids,
        seed=message.seed,
        replay=replay_from_proto(message.replay) if message.HasField("replay") else None,
    )


def _output_from_proto(message: detokenizer_pb2.OutputSpec) -> OutputSpec:
    if int(message.object_kind) not in _OBJECT_KINDS:
        raise _unknown("object_kind", message.object_kind)
    # Unspecified is none: a request without tools need not say so.
    tool_choice = int(message.tool_choice or ToolChoice.NONE)
    if tool_choice not in _TOOL_CHOICES:
        raise _unknown("tool_choice", tool_choice)
    return OutputSpec(
        object_kind=ObjectKind(message.object_kind),
        response_id=message.response_id,
        model=message.model,
        created_s=message.created_s,
        is_stream=message.is_stream,
        include_usage=message.include_usage,
        include_continuous_usage=message.include_continuous_usage,
        stop=tuple(message.stop),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens,
        parse_reasoning=message.parse_reasoning,
        starts_in_reasoning=message.starts_in_reasoning,
        include_reasoning=message.include_reasoning,
        tools=tuple(
            ToolSpec(
                name=tool.name,
                parameters=parse_schema(
                    tool.parameters_json, f"output.tools.[{i}].parameters_json"
                ),
            )
            for i, tool in enumerate(message.tools)
        ),
        tool_choice=ToolChoice(tool_choice),
        tool_choice_name=message.tool_choice_name,
        parallel_tool_calls=message.parallel_tool_calls,
        include_logprobs=message.include_logprobs,
        num_top_logprobs=message.num_top_logprobs,
        return_token_ids=message.return_token_ids,
        echo_texts=tuple(message.echo_texts),
        num_choices_per_prompt=message.num_choices_per_prompt,
        echo_members=parse_members(message.echo_json, "output.echo_json"),
        keep_object=message.keep_object,
        return_tokens_as_token_ids=message.return_tokens_as_token_ids,
        include_text=message.include_text,
        include_sealed_reasoning=message.include_sealed_reasoning,
        include_prompt_logprobs=message.include_prompt_logprobs,
        is_prompt_only=message.is_prompt_only,
    )


def _unknown(name: str, value: int) -> RequestError:
    field = f"output.{name}"
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field} {value} is unknown", field=field)


def _within(submit: TextSubmit, context: Context) -> TextSubmit:
    """The request with the call's own deadline as its time limit, where that is earlier."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return submit
    remaining_ms = max(1, int(remaining_s * 1000))
    return replace(submit, timeout_ms=min(submit.timeout_ms or remaining_ms, remaining_ms))


def _verdict_to_proto(verdict: tuple[int, RequestError | None]) -> detokenizer_pb2.TextVerdict:
    stream_id, refusal = verdict
    return detokenizer_pb2.TextVerdict(
        stream_id=stream_id, refusal=None if refusal is None else failure_to_proto(refusal)
    )


def _end_to_proto(entry: tuple[int, TextEnd]) -> detokenizer_pb2.TextEnd:
    stream_id, end = entry
    if isinstance(end, RequestError):
        return detokenizer_pb2.TextEnd(stream_id=stream_id, failed=failure_to_proto(end))
    return detokenizer_pb2.TextEnd(stream_id=stream_id, finished=_finished_to_proto(end))


def _finished_to_proto(end: TextEnd) -> detokenizer_pb2.TextFinished:
    assert not isinstance(end, RequestError)
    found = end.oddities.found
    return detokenizer_pb2.TextFinished(
        stats=stats_to_proto(end.stats),
        reason=int(end.reason),  # type: ignore[arg-type]  # enum values are ints on the wire
        object_json=end.object_json,
        oddities=detokenizer_pb2.OutputOddities(**found) if found else None,
    )


def _delta_to_proto(event: DeltaEvent) -> detokenizer_pb2.TextDelta:
    return detokenizer_pb2.TextDelta(
        index=event.index,
        reasoning=event.reasoning,
        content=event.content,
        tool_calls=[
            detokenizer_pb2.ToolCallDelta(
                index=piece.index, id=piece.call_id, name=piece.name, arguments=piece.arguments
            )
            for piece in event.tools
        ],
        token_ids=pack_ids(event.token_ids),
    )
