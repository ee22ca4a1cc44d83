"""The one connection to the scheduler: the sequences of all requests in one `Connect` stream.

Whatever is ready (submits, aborts) goes into one message. A message that comes in is handed out
without a pause, so that everything one step produced leaves this service in one message, too. When
the stream breaks, every sequence on it fails at once with UPSTREAM_LOST and the client connects
again by itself. Proto messages stop here.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeAlias

import grpc
import grpc.aio

from protos.glm.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.detokenizer.faults import internal_error
from services.detokenizer.messages import (
    AbortReason,
    FinishReason,
    SequenceFinished,
    SequenceSpec,
    TokenSubmit,
)
from services.detokenizer.ports import SequenceListener
from shared import rpc, wire
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.sampling import LoadSnapshot

RECONNECT_MIN_S: Final = 0.1
RECONNECT_MAX_S: Final = 2.0
# The scheduler takes messages of 64 MiB; a request, and a batch of them, stay below.
MAX_SUBMIT_BYTES: Final = 48 << 20
MAX_RECEIVE_MIB: Final = 64
_ID_LIMIT: Final = 1 << 32
_FINISH_REASONS: Final = frozenset(map(int, FinishReason))

_logger = get_logger(__name__)

P = ParamSpec("P")
Call: TypeAlias = grpc.aio.StreamStreamCall
Request: TypeAlias = scheduler_pb2.SchedulerServiceConnectRequest
Response: TypeAlias = scheduler_pb2.SchedulerServiceConnectResponse


@dataclass(slots=True)
class _Sequence:
    """Who hears about a stream id; nobody once this side has ended it."""

    listener: SequenceListener | None
    position: int
    request_id: str
    wants_logprobs: bool


class SchedulerClient:
    """An `Upstream`.

    Args:
        address: Where the scheduler listens.
        on_state: Told true when connected, false when lost.
        on_load: Told every snapshot.
    """

    def __init__(
        self,
        address: str,
        *,
        on_state: Callable[[bool], None],
        on_load: Callable[[LoadSnapshot], None],
    ) -> None:
        """Start disconnected; `run` connects."""
        self._address = address
        self._on_state = on_state
        self._on_load = on_load
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._submits: deque[tuple[scheduler_pb2.TokenSubmit, int]] = deque()
        self._aborts: list[scheduler_pb2.AbortSequence] = []
        self._outgoing = asyncio.Event()
        self.is_connected = False

    @property
    def num_open(self) -> int:
        """Sequences whose end has not come."""
        return len(self._sequences)

    async def run(self) -> None:
        """Keep connected until cancelled."""
        pause_s = RECONNECT_MIN_S
        while True:
            # A try before the socket exists would start gRPC's own back-off, which grows.
            if not _may_answer(self._address) or await self._serve_one_stream():
                pause_s = RECONNECT_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_MAX_S)

    def submit(self, submit: TokenSubmit, listener: SequenceListener) -> list[int]:
        """Send a request; `RequestError` when it cannot be sent."""
        if not self.is_connected:
            raise RequestError(
                FailureReason.UPSTREAM_LOST,
                "the scheduler cannot be reached",
                retry_after_ms=1000,
            )
        stream_ids = self._fresh_ids(len(submit.sequences))
        message = _submit_to_proto(submit, stream_ids)
        size = message.ByteSize()
        if size > MAX_SUBMIT_BYTES:
            raise RequestError(
                FailureReason.INVALID_ARGUMENT,
                f"the request is larger than {MAX_SUBMIT_BYTES} bytes with all its sequences",
            )
        wants_logprobs = submit.sampling.num_logprobs is not None
        for position, stream_id in enumerate(stream_ids):
            self._sequences[stream_id] = _Sequence(
                listener, position, submit.request_id, wants_logprobs
            )
        self._submits.append((message, size))
        self._outgoing.set()
        return stream_ids

    def abort(self, stream_id: int, reason: AbortReason, num_tokens_kept: int = 0) -> None:
        """End a sequence; its end is swallowed when it comes."""
        sequence = self._sequences.get(stream_id)
        if sequence is None or sequence.listener is None:
            return
        sequence.listener = None
        self._aborts.append(
            scheduler_pb2.AbortSequence(
                stream_id=stream_id,
                reason=int(reason),  # type: ignore[arg-type]  # enum values are ints on the wire
                num_tokens_kept=num_tokens_kept,
            )
        )
        self._outgoing.set()

    async def _serve_one_stream(self) -> bool:
        """One stream from connecting to its loss; whether it was ever up.

        Each has its own channel: a peer that comes back is reached at once, not after a back-off
        that grew while it was away.
        """
        was_connected = False
        async with rpc.open_channel(self._address, max_receive_mib=MAX_RECEIVE_MIB) as channel:
            call: Call | None = None
            try:
                await asyncio.wait_for(channel.channel_ready(), RECONNECT_MAX_S)
                call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect()
                await call.wait_for_connection()
                was_connected = True
                self._set_connected(True)
                await self._pump(call)
            except TimeoutError:
                _logger.debug("scheduler is not there yet", extra={"address": self._address})
            except grpc.aio.AioRpcError as error:
                _logger.warning("scheduler lost", extra={"code": error.code().name})
            except (ValueError, RequestError) as error:
                _logger.exception("scheduler broke the contract", exc_info=error)
            except asyncio.CancelledError:
                # Reading a call that the writer gave up raises this too; only ours is passed on.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            finally:
                if call is not None:
                    call.cancel()
                self._fail_all()
        return was_connected

    async def _pump(self, call: Call) -> None:
        """Read until the stream ends; the writer ends with it."""
        writer = asyncio.create_task(self._write(call))
        writer.add_done_callback(lambda _: call.cancel())
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._take(response)
        finally:
            writer.cancel()
            await asyncio.wait({writer})
        _logger.warning("scheduler closed the connection")

    async def _write(self, call: Call) -> None:
        """Send what is ready; when it ends, for whatever reason, the reader is told."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._outgoing.wait()
                self._outgoing.clear()
                while (request := self._next_batch()) is not None:
                    await call.write(request)

    def _next_batch(self) -> Request | None:
        if not (self._submits or self._aborts):
            return None
        submits, size = [], 0
        while self._submits and size + self._submits[0][1] <= MAX_SUBMIT_BYTES:
            message, message_size = self._submits.popleft()
            submits.append(message)
            size += message_size
        aborts: list[scheduler_pb2.AbortSequence] = []
        if not self._submits:  # an abort must not overtake the submit it belongs to
            aborts, self._aborts = self._aborts, []
        return Request(submits=submits, aborts=aborts)

    # ---- what comes in ----

    def _take(self, response: Response) -> None:
        """Hand out one message; tokens come before the ends of the same message."""
        for verdict in response.verdicts:
            self._take_verdict(verdict)
        if response.HasField("tokens"):
            self._take_tokens(response.tokens)
        for end in response.ends:
            sequence = self._sequences.pop(end.stream_id, None)
            if sequence is not None and sequence.listener is not None:
                position, told = sequence.position, _end_from_proto(end)
                _guarded(sequence, sequence.listener.on_end, position, told)
        if response.HasField("load"):
            self._on_load(wire.load_from_proto(response.load))

    def _take_verdict(self, verdict: scheduler_pb2.Verdict) -> None:
        refusal = None
        sequence = self._sequences.get(verdict.stream_id)
        if verdict.HasField("refusal"):
            refusal = wire.failure_from_proto(verdict.refusal)
            self._sequences.pop(verdict.stream_id, None)
        if sequence is not None and sequence.listener is not None:
            sequence.listener.on_verdict(sequence.position, refusal)

    def _take_tokens(self, columns: scheduler_pb2.TokenColumns) -> None:
        counts = columns.num_tokens
        wire.check_columns(
            len(columns.stream_ids),
            num_previous_tokens=columns.num_previous_tokens,
            num_tokens=counts,
        )
        ids = wire.unpack_ids(columns.token_ids, "token_ids").tolist()
        wire.check_columns(sum(counts), token_ids=ids)
        entries = wire.logprobs_from_proto(columns.logprobs) if columns.HasField("logprobs") else []
        start = first_entry = 0
        for stream_id, num_previous, count in zip(
            columns.stream_ids, columns.num_previous_tokens, counts, strict=True
        ):
            end = start + count
            sequence = self._sequences.get(stream_id)
            logprobs = None
            if sequence is not None and sequence.wants_logprobs:
                logprobs = entries[first_entry : first_entry + count]
                first_entry += count
                wire.check_columns(count, logprobs=logprobs)
            if sequence is not None and sequence.listener is not None:
                tell, position = sequence.listener.on_tokens, sequence.position
                _guarded(sequence, tell, position, num_previous, ids[start:end], logprobs)
            start = end

    # ---- the state of the connection ----

    def _fresh_ids(self, count: int) -> list[int]:
        fresh: list[int] = []
        while len(fresh) < count:
            self._next_id = (self._next_id + 1) % _ID_LIMIT
            if self._next_id not in self._sequences:
                fresh.append(self._next_id)
        return fresh

    def _set_connected(self, is_connected: bool) -> None:
        if is_connected != self.is_connected:
            self.is_connected = is_connected
            _logger.info(
                "scheduler connected" if is_connected else "scheduler disconnected",
                extra={"address": self._address},
            )
            self._on_state(is_connected)

    def _fail_all(self) -> None:
        """The stream is gone: everything on it fails, nothing is sent on the next one."""
        lost, self._sequences = self._sequences, {}
        self._submits, self._aborts = deque(), []
        self._set_connected(False)
        error = RequestError(
            FailureReason.UPSTREAM_LOST,
            "the connection to the scheduler was lost",
            retry_after_ms=1000,
        )
        for sequence in lost.values():
            if sequence.listener is not None:
                sequence.listener.on_end(sequence.position, error)


def _guarded(sequence: _Sequence, tell: Callable[P, None], *args: P.args, **kw: P.kwargs) -> None:
    """Tell a listener; a bug that it runs into ends its own request and no other."""
    listener = sequence.listener
    try:
        tell(*args, **kw)
    except Exception as error:  # noqa: BLE001  # one request may fail, the others may not
        if listener is not None:
            listener.on_fault(internal_error(error, sequence.request_id))


def _may_answer(address: str) -> bool:
    return not address.startswith("unix:") or os.path.exists(address.removeprefix("unix:"))


def _submit_to_proto(submit: TokenSubmit, stream_ids: list[int]) -> scheduler_pb2.TokenSubmit:
    return scheduler_pb2.TokenSubmit(
        request_id=submit.request_id,
        sequences=[
            _sequence_to_proto(sequence, stream_id)
            for sequence, stream_id in zip(submit.sequences, stream_ids, strict=True)
        ],
        sampling=wire.sampling_to_proto(submit.sampling),
        traceparent=submit.traceparent,
        priority=submit.priority,
        timeout_ms=submit.timeout_ms,
        cache_salt=submit.cache_salt,
        tenant_id=submit.tenant_id,
    )


def _sequence_to_proto(sequence: SequenceSpec, stream_id: int) -> common_pb2.SequenceSpec:
    return common_pb2.SequenceSpec(
        stream_id=stream_id,
        index=sequence.index,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
        seed=sequence.seed,
        replay=wire.replay_to_proto(sequence.replay),
    )


def _end_from_proto(end: scheduler_pb2.SequenceEnd) -> SequenceFinished | RequestError:
    if end.WhichOneof("end") != "finished":
        return wire.failure_from_proto(end.failed)
    finished = end.finished
    if int(finished.reason) not in _FINISH_REASONS:
        return RequestError(FailureReason.INTERNAL, f"unknown finish reason {finished.reason}")
    return SequenceFinished(
        reason=FinishReason(finished.reason),
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        stats=wire.stats_from_proto(finished.stats),
    )
