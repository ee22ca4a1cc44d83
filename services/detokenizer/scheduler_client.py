"""The one connection to a scheduler: the sequences of all requests in one `Connect` stream.

Whatever is ready (submits, aborts) goes into one message. A message that comes in is handed out
without a pause, so that everything one step produced leaves this service in one message, too. When
the stream breaks, every sequence on it is lost at once. Proto messages stop here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeAlias

import grpc.aio

from protos.glm.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.detokenizer.faults import internal_error
from services.detokenizer.messages import SequenceFinished, SequenceSpec, TokenSubmit
from services.detokenizer.ports import LossListener
from shared import wire
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from shared.rpc import error_from_rpc
from shared.rpc_link import ConnectLink, Silence, StreamIds, SubmitQueue
from shared.sampling import LoadSnapshot

# The scheduler takes messages of 64 MiB; a request, and a batch of them, stay below.
MAX_SUBMIT_BYTES: Final = 48 << 20
MAX_RECEIVE_MIB: Final = 64
RESET_TIMEOUT_S: Final = 5.0
_FINISH_REASONS: Final = frozenset(map(int, FinishReason))

P = ParamSpec("P")
Request: TypeAlias = scheduler_pb2.SchedulerServiceConnectRequest
Response: TypeAlias = scheduler_pb2.SchedulerServiceConnectResponse


@dataclass(slots=True)
class _Sequence:
    """Who hears about a stream id; nobody once this side has ended it."""

    listener: LossListener | None
    position: int
    request_id: str
    wants_logprobs: bool


class SchedulerClient:
    """A scheduler, as long as it is reached.

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
        self._on_state = on_state
        self._on_load = on_load
        self._link = ConnectLink(
            address,
            peer="scheduler",
            open_call=lambda c: scheduler_pb2_grpc.SchedulerServiceStub(c).Connect(),
            owner=self,
            max_receive_mib=MAX_RECEIVE_MIB,
        )
        self._sequences: dict[int, _Sequence] = {}
        self._ids = StreamIds(lambda i: i in self._sequences)
        self._submits: SubmitQueue[scheduler_pb2.TokenSubmit] = SubmitQueue(MAX_SUBMIT_BYTES)
        self._aborts: list[scheduler_pb2.AbortSequence] = []
        self.silence = Silence()

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler is reached."""
        return self._link.is_connected

    @property
    def num_open(self) -> int:
        """Sequences whose end has not come."""
        return len(self._sequences)

    async def run(self) -> None:
        """Keep connected until cancelled."""
        await self._link.run()

    def drop(self) -> None:
        """Give a scheduler up that does not answer; it is reached again when it does."""
        self._link.drop()

    def submit(self, submit: TokenSubmit, listener: LossListener) -> list[int]:
        """Send a request; `RequestError` when it cannot be sent."""
        self._link.check_connected()
        stream_ids = [self._ids.fresh() for _ in submit.sequences]
        message = _submit_to_proto(submit, stream_ids)
        size = self._submits.check(message)
        wants_logprobs = submit.sampling.num_logprobs is not None
        for position, stream_id in enumerate(stream_ids):
            self._sequences[stream_id] = _Sequence(
                listener, position, submit.request_id, wants_logprobs
            )
        self._submits.put(message, size)
        self._link.wake()
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
        self._link.wake()

    async def reset_cache(self) -> int:
        """Ask the scheduler to share nothing that was computed so far; how many blocks it was."""
        self._link.check_connected()
        assert self._link.channel is not None
        stub = scheduler_pb2_grpc.PrefixCacheServiceStub(self._link.channel)
        try:
            answer = await stub.ResetCache(
                scheduler_pb2.ResetCacheRequest(), timeout=RESET_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return int(answer.num_blocks)

    # ---- rpc_link.LinkOwner ----

    def next_message(self) -> Request | None:
        """Whatever is ready."""
        if not (self._submits or self._aborts):
            return None
        submits = self._submits.take()
        aborts: list[scheduler_pb2.AbortSequence] = []
        if not self._submits:  # an abort must not overtake the submit it belongs to
            aborts, self._aborts = self._aborts, []
        return Request(submits=submits, aborts=aborts)

    def take_message(self, message: Response) -> None:
        """Hand out one message; tokens come before the ends of the same message."""
        self.silence.hear()
        for verdict in message.verdicts:
            self._take_verdict(verdict)
        if message.HasField("tokens"):
            self._take_tokens(message.tokens)
        for end in message.ends:
            sequence = self._sequences.pop(end.stream_id, None)
            if sequence is not None and sequence.listener is not None:
                position, told = sequence.position, _end_from_proto(end)
                _guarded(sequence, sequence.listener.on_end, position, told)
        if message.HasField("load"):
            self._on_load(wire.load_from_proto(message.load))

    def connection_changed(self, is_connected: bool) -> None:
        """After a loss everything is lost, and nothing of it is sent on the next stream."""
        lost: dict[int, _Sequence] = {}
        if not is_connected:
            lost, self._sequences = self._sequences, {}
            self._submits.clear()
            self._aborts = []
        self._on_state(is_connected)
        for sequence in lost.values():
            if sequence.listener is not None:
                sequence.listener.on_lost(sequence.position)

    # ---- what comes in ----

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
        self._take_counts(columns)
        for entry in columns.prompt_logprobs:
            self._take_prompt(entry)
        find = self._sequences.get
        end = first_entry = 0
        for stream_id, num_previous, count in zip(
            columns.stream_ids, columns.num_previous_tokens, counts, strict=True
        ):
            start, end = end, end + count
            sequence = find(stream_id)
            if sequence is None:
                continue
            logprobs = None
            if sequence.wants_logprobs:
                logprobs = entries[first_entry : first_entry + count]
                first_entry += count
                wire.check_columns(count, logprobs=logprobs)
            listener = sequence.listener
            if listener is not None:
                try:  # not by `_guarded`: this is done for every token
                    listener.on_tokens(sequence.position, num_previous, ids[start:end], logprobs)
                except Exception as error:  # noqa: BLE001  # as there
                    listener.on_fault(internal_error(error, sequence.request_id))

    def _take_prompt(self, entry: scheduler_pb2.PromptLogprobs) -> None:
        sequence = self._sequences.get(entry.stream_id)
        if sequence is not None and sequence.listener is not None:
            tell = sequence.listener.on_prompt_logprobs
            values = wire.logprobs_from_proto(entry.logprobs)
            _guarded(sequence, tell, sequence.position, entry.start, values)

    def _take_counts(self, columns: scheduler_pb2.TokenColumns) -> None:
        """What the tokens of this message are counted with; told before them."""
        for start in columns.starts:
            sequence = self._sequences.get(start.stream_id)
            if sequence is not None and sequence.listener is not None:
                sequence.listener.on_start(sequence.position, wire.stats_from_proto(start.stats))
        drafted, accepted = columns.num_drafted_tokens, columns.num_accepted_tokens
        if not drafted and not accepted:
            return
        num_sequences = len(columns.stream_ids)
        wire.check_columns(num_sequences, num_drafted_tokens=drafted, num_accepted_tokens=accepted)
        for stream_id, *counts in zip(columns.stream_ids, drafted, accepted, strict=True):
            sequence = self._sequences.get(stream_id)
            if sequence is not None and sequence.listener is not None:
                sequence.listener.on_drafts(sequence.position, *counts)


def _guarded(sequence: _Sequence, tell: Callable[P, None], *args: P.args, **kw: P.kwargs) -> None:
    """Tell a listener; a bug that it runs into ends its own request and no other."""
    listener = sequence.listener
    try:
        tell(*args, **kw)
    except Exception as error:  # noqa: BLE001  # one request may fail, the others may not
        if listener is not None:
            listener.on_fault(internal_error(error, sequence.request_id))


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
        first_token_timeout_ms=submit.first_token_timeout_ms,
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
