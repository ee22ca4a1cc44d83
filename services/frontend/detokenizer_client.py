"""The one connection to a detokenizer: all requests that this gateway sent it, in one stream.

Writes are batched: whatever is ready (submits, aborts, credits) goes into one message. Credits are
collected and sent at most every 50 ms. When the stream breaks, the owner is told of every request
on it, and of refusals, for it may know another way. Proto messages stop here.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

import grpc
import grpc.aio

from protos.glm.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from services.frontend.exchange import Exchange
from services.frontend.submission import OutputPlan, Submission
from shared import rpc, wire
from shared.errors import FailureReason, RequestError
from shared.rpc_link import ConnectLink, Silence, StreamIds, SubmitQueue
from shared.sampling import LoadSnapshot

CREDIT_INTERVAL_S: Final = 0.05
ABORT_TIMEOUT_S: Final = 2.0
RESET_TIMEOUT_S: Final = 2.0
# The detokenizer takes messages of 16 MiB; a request, and a batch of them, stay below.
MAX_SUBMIT_BYTES: Final = 12 << 20


class DetokenizerClient:
    """Submits requests and hands each its verdict, bytes and end.

    Args:
        address: Where the detokenizer listens.
        credit_bytes: Bytes of a stream that may be under way.
        on_change: Told when `is_connected` or `is_ready` may have changed.
        on_lost: Gets each request that was on a stream that broke; ends it, or sends it elsewhere.
        on_refused: The same for a request that the verdict refuses.
        on_failed: The same for one that ends badly.
        on_load: Told every snapshot.
    """

    def __init__(
        self,
        address: str,
        *,
        credit_bytes: int,
        on_change: Callable[[], None] = lambda: None,
        on_lost: Callable[[Exchange, RequestError], None] = Exchange.fail,
        on_refused: Callable[[Exchange, RequestError], None] = Exchange.fail,
        on_failed: Callable[[Exchange, RequestError], None] = Exchange.fail,
        on_load: Callable[[LoadSnapshot], None] = lambda _: None,
    ) -> None:
        """Start disconnected; `run` connects."""
        self._credit_bytes = credit_bytes
        self._on_change = on_change
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._on_failed = on_failed
        self._on_load = on_load
        self._link = ConnectLink(
            address, peer="detokenizer", open_call=lambda c: _stub(c).Connect(), owner=self
        )
        self._exchanges: dict[int, Exchange] = {}
        self._aborted: set[int] = set()
        self._ids = StreamIds(lambda i: i in self._exchanges or i in self._aborted)
        self._submits: SubmitQueue[detokenizer_pb2.ConnectSubmit] = SubmitQueue(MAX_SUBMIT_BYTES)
        self._aborts: list[int] = []
        self._credits: dict[int, int] = {}
        self._is_credit_due = False
        self.load = LoadSnapshot()
        # Monotonic seconds at which it came.
        self.load_at = 0.0
        self.is_draining = False
        self.num_sequences = 0
        self._gives_signs = False
        self._silence = Silence()

    @property
    def is_connected(self) -> bool:
        """Whether the detokenizer is reached."""
        return self._link.is_connected

    @property
    def is_ready(self) -> bool:
        """Whether it takes new requests, and the chain behind it serves them."""
        return self.is_connected and not self.is_draining and self.load.is_worker_ready

    @property
    def num_open(self) -> int:
        """Requests whose end has not come."""
        return len(self._exchanges)

    async def run(self) -> None:
        """Keep connected until cancelled."""
        await self._link.run()

    def look(self) -> int:
        """Looks since it said something, where it promised to speak."""
        return self._silence.look(is_promised=self.is_connected and self._gives_signs)

    def drop(self) -> None:
        """Break the connection; what is on it is lost."""
        self._link.drop()

    def submit(self, submission: Submission, exchange: Exchange | None = None) -> Exchange:
        """Send a request; raises UPSTREAM_LOST when there is no connection to send it on.

        Args:
            submission: The request.
            exchange: Its mailbox, where it was on another connection before.
        """
        self._link.check_connected()
        message = detokenizer_pb2.ConnectSubmit(
            stream_id=self._ids.fresh(),
            submit=_submit_to_proto(submission),
            initial_credit_bytes=self._credit_bytes,
        )
        size = self._submits.check(message)
        if exchange is None:
            exchange = Exchange(submission.request_id, submission.constraint_param)
        exchange.stream_id, exchange.num_bytes = message.stream_id, size
        exchange.num_sequences = len(submission.sequences)
        self.num_sequences += exchange.num_sequences
        self._exchanges[exchange.stream_id] = exchange
        self._submits.put(message, size)
        self._link.wake()
        return exchange

    def close(self, exchange: Exchange) -> None:
        """Give a request up; aborts it if its end has not come. Idempotent."""
        if self._exchanges.get(exchange.stream_id) is not exchange:
            return
        self._pop(exchange.stream_id)
        self._credits.pop(exchange.stream_id, None)
        self._aborted.add(exchange.stream_id)
        self._aborts.append(exchange.stream_id)
        self._link.wake()

    def give_credit(self, exchange: Exchange, num_bytes: int) -> None:
        """Say that bytes of a stream have left for its client."""
        stream_id = exchange.stream_id
        if num_bytes and self._exchanges.get(stream_id) is exchange:
            self._credits[stream_id] = self._credits.get(stream_id, 0) + num_bytes
            if not self._is_credit_due:
                self._is_credit_due = True
                asyncio.get_running_loop().call_later(CREDIT_INTERVAL_S, self._link.wake)

    def fail_all(self, error: RequestError) -> None:
        """End what is open with `error`; its handlers tell their clients and abort it."""
        for exchange in self._exchanges.values():
            exchange.fail(error)

    async def abort(self, request_id: str) -> int:
        """Ask the detokenizer to end a request by its id; how many were found."""
        self._link.check_connected()
        assert self._link.channel is not None
        with self._told():
            answer = await _stub(self._link.channel).Abort(
                detokenizer_pb2.DetokenizerServiceAbortRequest(request_id=request_id),
                timeout=ABORT_TIMEOUT_S,
            )
        return int(answer.num_aborted)

    async def reset_cache(self) -> int:
        """Let no later request share what was computed so far; how many blocks that were."""
        self._link.check_connected()
        assert self._link.channel is not None
        with self._told():
            answer = await _stub(self._link.channel).ResetCache(
                detokenizer_pb2.DetokenizerServiceResetCacheRequest(), timeout=RESET_TIMEOUT_S
            )
        return int(answer.num_blocks)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A call beside the stream: what goes wrong with it is a `RequestError`."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from None
        except asyncio.CancelledError:
            if rpc.is_task_cancelled():
                raise
            # Nobody cancelled us: the channel was closed under the call, the connection is lost.
            raise self._link.lost_error() from None

    # -- rpc_link.LinkOwner ------------------------------------------------------------------

    def next_message(self) -> detokenizer_pb2.DetokenizerServiceConnectRequest | None:
        """Whatever is ready."""
        if not (self._submits or self._aborts or self._credits):
            return None
        submits = self._submits.take()
        # An abort must not overtake the submit it belongs to.
        aborts, credits = ([], {}) if self._submits else (self._aborts, self._credits)
        if not self._submits:
            self._aborts, self._credits, self._is_credit_due = [], {}, False
        return detokenizer_pb2.DetokenizerServiceConnectRequest(
            submits=submits,
            aborted_stream_ids=aborts,
            credits=detokenizer_pb2.CreditColumns(
                stream_ids=list(credits), num_bytes=list(credits.values())
            )
            if credits
            else None,
        )

    def take_message(self, message: detokenizer_pb2.DetokenizerServiceConnectResponse) -> None:
        """Hand out one message; bytes come before the ends of the same message."""
        was_ready = self.is_ready
        self._silence.hear()
        self._gives_signs = self._gives_signs or message.sign_interval_ms > 0
        self.is_draining = message.is_draining
        for verdict in message.verdicts:
            self._take_verdict(verdict)
        if message.HasField("frames"):
            self._take_frames(message.frames)
        for end in message.ends:
            self._take_end(end)
        if message.HasField("load"):
            self.load = wire.load_from_proto(message.load)
            self.load_at = time.monotonic()
            self._on_load(self.load)
        if was_ready != self.is_ready:
            self._on_change()

    def connection_changed(self, is_connected: bool) -> None:
        """After a loss nothing of what was open is sent on the next stream."""
        self.is_draining = self._gives_signs = False
        if not is_connected:
            self._forget_all()
        self._on_change()

    def _take_verdict(self, verdict: detokenizer_pb2.TextVerdict) -> None:
        exchange = self._exchanges.get(verdict.stream_id)
        if verdict.HasField("refusal"):
            self._forget(verdict.stream_id)
            if exchange is not None:
                self._on_refused(exchange, wire.failure_from_proto(verdict.refusal))
        elif exchange is not None:
            exchange.admit()

    def _take_frames(self, frames: detokenizer_pb2.FrameColumns) -> None:
        data, start = frames.data, 0
        for stream_id, size in zip(frames.stream_ids, frames.num_bytes, strict=True):
            exchange = self._exchanges.get(stream_id)
            if exchange is not None:
                exchange.push(data[start : start + size])
            start += size

    def _take_end(self, end: detokenizer_pb2.TextEnd) -> None:
        exchange = self._exchanges.get(end.stream_id)
        self._forget(end.stream_id)
        if exchange is None:
            return
        if end.WhichOneof("end") == "finished":
            reason = common_pb2.FinishReason.Name(end.finished.reason)
            exchange.finish(
                reason.removeprefix("FINISH_REASON_").lower(),
                wire.stats_from_proto(end.finished.stats),
                end.finished.object_json,
                {field.name: count for field, count in end.finished.oddities.ListFields()},
            )
            return
        failure = wire.failure_from_proto(end.failed)
        if self.is_draining and failure.reason is FailureReason.DRAINING:
            # It stops before the request could end: the request is lost with it.
            self._on_lost(exchange, failure)
        else:
            self._on_failed(exchange, failure)

    def _pop(self, stream_id: int) -> None:
        exchange = self._exchanges.pop(stream_id, None)
        if exchange is not None:
            self.num_sequences -= exchange.num_sequences

    def _forget(self, stream_id: int) -> None:
        self._pop(stream_id)
        self._aborted.discard(stream_id)
        self._credits.pop(stream_id, None)

    def _forget_all(self) -> None:
        lost, self._exchanges = self._exchanges, {}
        self.num_sequences = 0
        self._submits.clear()
        self._aborts, self._credits = [], {}
        self._aborted.clear()
        self._is_credit_due = False
        self.load = LoadSnapshot()
        for exchange in lost.values():
            self._on_lost(exchange, self._link.lost_error())


def _stub(channel: grpc.aio.Channel) -> detokenizer_pb2_grpc.DetokenizerServiceStub:
    return detokenizer_pb2_grpc.DetokenizerServiceStub(channel)


def _submit_to_proto(submission: Submission) -> detokenizer_pb2.TextSubmit:
    message = detokenizer_pb2.TextSubmit(
        request_id=submission.request_id,
        sampling=wire.sampling_to_proto(submission.sampling),
        output=_output_to_proto(submission.output),
        traceparent=submission.traceparent,
        timeout_ms=submission.timeout_ms,
        cache_salt=submission.cache_salt,
        tenant_id=submission.tenant_id,
        priority=submission.priority,
        first_token_timeout_ms=submission.first_token_timeout_ms,
        attempt=submission.attempt,
    )
    packed: dict[int, bytes] = {}
    for sequence in submission.sequences:
        ids = sequence.prompt_token_ids
        # The choices of one prompt share the list, so it is packed once.
        if id(ids) not in packed:
            packed[id(ids)] = wire.pack_ids(ids)
        message.sequences.add(
            index=sequence.index,
            prompt_token_ids=packed[id(ids)],
            seed=sequence.seed,
            replay=wire.replay_to_proto(sequence.replay),
        )
    return message


def _output_to_proto(output: OutputPlan) -> detokenizer_pb2.OutputSpec:
    return detokenizer_pb2.OutputSpec(
        object_kind=int(output.object_kind),  # type: ignore[arg-type]  # enums are ints on the wire
        response_id=output.response_id,
        model=output.model,
        created_s=output.created_s,
        is_stream=output.is_stream,
        include_usage=output.include_usage,
        include_continuous_usage=output.include_continuous_usage,
        stop=output.stop,
        include_stop_str_in_output=output.include_stop_str_in_output,
        skip_special_tokens=output.skip_special_tokens,
        parse_reasoning=output.parse_reasoning,
        starts_in_reasoning=output.starts_in_reasoning,
        include_reasoning=output.include_reasoning,
        tools=[
            detokenizer_pb2.ToolSpec(name=tool.name, parameters_json=tool.parameters_json)
            for tool in output.tools
        ],
        tool_choice=int(output.tool_choice),  # type: ignore[arg-type]  # enums are ints on the wire
        tool_choice_name=output.tool_choice_name,
        parallel_tool_calls=output.parallel_tool_calls,
        include_logprobs=output.include_logprobs,
        num_top_logprobs=output.num_top_logprobs,
        return_token_ids=output.return_token_ids,
        return_tokens_as_token_ids=output.return_tokens_as_token_ids,
        echo_texts=output.echo_texts,
        num_choices_per_prompt=output.num_choices_per_prompt,
        echo_json=output.echo_json,
        keep_object=output.keep_object,
        include_sealed_reasoning=output.include_sealed_reasoning,
        include_prompt_logprobs=output.include_prompt_logprobs,
        is_prompt_only=output.is_prompt_only,
        include_text=output.include_text,
    )
