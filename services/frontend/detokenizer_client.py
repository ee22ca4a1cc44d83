"""The one connection to the detokenizer: all requests of this gateway in one `Connect` stream.

Writes are batched: whatever is ready (submits, aborts, credits) goes into one message. Credits are
collected and sent at most every 50 ms. When the stream breaks, every request on it fails at once
with UPSTREAM_LOST and the client connects again by itself, 0.1 to 2 s apart.
Proto messages stop here.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import grpc
import grpc.aio

from protos.glm.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from services.frontend.exchange import Exchange
from services.frontend.submission import OutputPlan, Submission
from shared import rpc, wire
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.sampling import LoadSnapshot

CREDIT_INTERVAL_S: Final = 0.05
RECONNECT_MIN_S: Final = 0.1
RECONNECT_MAX_S: Final = 2.0
ABORT_TIMEOUT_S: Final = 2.0
# The detokenizer takes messages of 16 MiB; a request, and a batch of them, stay below.
MAX_SUBMIT_BYTES: Final = 12 << 20
_ID_LIMIT: Final = 1 << 32

_logger = get_logger(__name__)

Call: TypeAlias = grpc.aio.StreamStreamCall


class DetokenizerClient:
    """Submits requests and hands each its verdict, bytes and end.

    Args:
        address: Where the detokenizer listens.
        credit_bytes: Bytes of a stream that may be under way.
        on_state: Told true when connected, false when lost.
    """

    def __init__(
        self,
        address: str,
        *,
        credit_bytes: int,
        on_state: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Start disconnected; `run` connects."""
        self._address = address
        self._credit_bytes = credit_bytes
        self._on_state = on_state
        self._channel: grpc.aio.Channel | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._aborted: set[int] = set()
        self._next_id = 0
        # With their sizes, in order.
        self._submits: deque[tuple[detokenizer_pb2.ConnectSubmit, int]] = deque()
        self._aborts: list[int] = []
        self._credits: dict[int, int] = {}
        self._is_credit_due = False
        self._outgoing = asyncio.Event()
        self.is_connected = False
        self.load = LoadSnapshot()

    @property
    def num_open(self) -> int:
        """Requests whose end has not come."""
        return len(self._exchanges)

    async def run(self) -> None:
        """Keep connected until cancelled."""
        pause_s = RECONNECT_MIN_S
        async with rpc.open_channel(self._address) as channel:
            self._channel = channel
            while True:
                # A try before the socket exists would start gRPC's own back-off, which grows.
                if not _may_answer(self._address) or await self._serve_one_stream(channel):
                    pause_s = RECONNECT_MIN_S
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_MAX_S)

    def submit(self, submission: Submission) -> Exchange:
        """Send a request; raises UPSTREAM_LOST when there is no connection to send it on."""
        if not self.is_connected:
            raise RequestError(
                FailureReason.UPSTREAM_LOST,
                "the detokenizer cannot be reached",
                retry_after_ms=1000,
            )
        message = detokenizer_pb2.ConnectSubmit(
            stream_id=self._fresh_id(),
            submit=_submit_to_proto(submission),
            initial_credit_bytes=self._credit_bytes,
        )
        size = message.ByteSize()
        if size > MAX_SUBMIT_BYTES:
            raise RequestError(
                FailureReason.INVALID_ARGUMENT,
                f"the request is larger than {MAX_SUBMIT_BYTES} bytes with all its choices; "
                "ask for fewer choices or prompts",
            )
        exchange = Exchange(message.stream_id, submission.request_id)
        self._exchanges[exchange.stream_id] = exchange
        self._submits.append((message, size))
        self._outgoing.set()
        return exchange

    def close(self, exchange: Exchange) -> None:
        """Give a request up; aborts it if its end has not come. Idempotent."""
        if self._exchanges.pop(exchange.stream_id, None) is None:
            return
        self._credits.pop(exchange.stream_id, None)
        self._aborted.add(exchange.stream_id)
        self._aborts.append(exchange.stream_id)
        self._outgoing.set()

    def give_credit(self, exchange: Exchange, num_bytes: int) -> None:
        """Say that bytes of a stream have left for its client."""
        stream_id = exchange.stream_id
        if num_bytes and stream_id in self._exchanges:
            self._credits[stream_id] = self._credits.get(stream_id, 0) + num_bytes
            if not self._is_credit_due:
                self._is_credit_due = True
                asyncio.get_running_loop().call_later(CREDIT_INTERVAL_S, self._outgoing.set)

    def fail_all(self, error: RequestError) -> None:
        """End what is open with `error`; its handlers tell their clients and abort it."""
        for exchange in self._exchanges.values():
            exchange.fail(error)

    async def abort(self, request_id: str) -> int:
        """Ask the detokenizer to end a request by its id; how many were found."""
        if self._channel is None or not self.is_connected:
            raise RequestError(FailureReason.UPSTREAM_LOST, "the detokenizer cannot be reached")
        stub = detokenizer_pb2_grpc.DetokenizerServiceStub(self._channel)
        try:
            answer = await stub.Abort(
                detokenizer_pb2.DetokenizerServiceAbortRequest(request_id=request_id),
                timeout=ABORT_TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from None
        return int(answer.num_aborted)

    async def _serve_one_stream(self, channel: grpc.aio.Channel) -> bool:
        """One stream from connecting to its loss; whether it was ever up."""
        was_connected = False
        call: Call | None = None
        try:
            # A call on a channel that is not ready would wait inside the library, out of sight.
            await asyncio.wait_for(channel.channel_ready(), RECONNECT_MAX_S)
            call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Connect()
            await call.wait_for_connection()
            was_connected = True
            self._set_connected(True)
            await self._pump(call)
        except TimeoutError:
            _logger.debug("detokenizer is not there yet", extra={"address": self._address})
        except grpc.aio.AioRpcError as error:
            _logger.warning("detokenizer lost", extra={"code": error.code().name})
        except (ValueError, RequestError) as error:
            _logger.exception("detokenizer broke the contract", exc_info=error)
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
        _logger.warning("detokenizer closed the connection")

    async def _write(self, call: Call) -> None:
        """Send what is ready; when it ends, for whatever reason, the reader is told."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._outgoing.wait()
                self._outgoing.clear()
                while (request := self._next_batch()) is not None:
                    await call.write(request)

    def _next_batch(self) -> detokenizer_pb2.DetokenizerServiceConnectRequest | None:
        if not (self._submits or self._aborts or self._credits):
            return None
        submits, size = [], 0
        while self._submits and size + self._submits[0][1] <= MAX_SUBMIT_BYTES:
            message, message_size = self._submits.popleft()
            submits.append(message)
            size += message_size
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

    def _take(self, response: detokenizer_pb2.DetokenizerServiceConnectResponse) -> None:
        """Hand out one message; bytes come before the ends of the same message."""
        for verdict in response.verdicts:
            exchange = self._exchanges.get(verdict.stream_id)
            if verdict.HasField("refusal"):
                self._forget(verdict.stream_id)
                if exchange is not None:
                    exchange.fail(wire.failure_from_proto(verdict.refusal))
            elif exchange is not None:
                exchange.admit()
        if response.HasField("frames"):
            self._take_frames(response.frames)
        for end in response.ends:
            self._take_end(end)
        if response.HasField("load"):
            self.load = wire.load_from_proto(response.load)

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
            )
        else:
            exchange.fail(wire.failure_from_proto(end.failed))

    def _forget(self, stream_id: int) -> None:
        self._exchanges.pop(stream_id, None)
        self._aborted.discard(stream_id)
        self._credits.pop(stream_id, None)

    def _fresh_id(self) -> int:
        while True:
            self._next_id = (self._next_id + 1) % _ID_LIMIT
            if self._next_id not in self._exchanges and self._next_id not in self._aborted:
                return self._next_id

    def _set_connected(self, is_connected: bool) -> None:
        if is_connected != self.is_connected:
            self.is_connected = is_connected
            _logger.info(
                "detokenizer connected" if is_connected else "detokenizer disconnected",
                extra={"address": self._address},
            )
            self._on_state(is_connected)

    def _fail_all(self) -> None:
        """The stream is gone: everything on it fails, nothing is sent on the next one."""
        lost, self._exchanges = self._exchanges, {}
        self._submits, self._aborts, self._credits = deque(), [], {}
        self._aborted.clear()
        self._is_credit_due = False
        self.load = LoadSnapshot()
        self._set_connected(False)
        for exchange in lost.values():
            exchange.fail(
                RequestError(
                    FailureReason.UPSTREAM_LOST,
                    "the connection to the detokenizer was lost",
                    retry_after_ms=1000,
                )
            )


def _may_answer(address: str) -> bool:
    return not address.startswith("unix:") or os.path.exists(address.removeprefix("unix:"))


def _submit_to_proto(submission: Submission) -> detokenizer_pb2.TextSubmit:
    message = detokenizer_pb2.TextSubmit(
        request_id=submission.request_id,
        sampling=wire.sampling_to_proto(submission.sampling),
        output=_output_to_proto(submission.output),
        traceparent=submission.traceparent,
        timeout_ms=submission.timeout_ms,
        cache_salt=submission.cache_salt,
        tenant_id=submission.tenant_id,
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
        parallel_tool_calls=output.parallel_tool_calls,
        include_logprobs=output.include_logprobs,
        num_top_logprobs=output.num_top_logprobs,
        return_token_ids=output.return_token_ids,
        echo_texts=output.echo_texts,
        num_choices_per_prompt=output.num_choices_per_prompt,
    )
