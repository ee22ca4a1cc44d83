"""The gRPC door of the scheduler: submits and aborts in, verdicts, token columns and ends out.

A `Connect` stream is one outlet with many sequences, a `Generate` call one outlet with one request;
both write through a bounded outbox. Messages of glm.v1 stop here.
"""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from protos.glm.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.cache_events import CacheUpdate
from services.scheduler.engine import Engine
from services.scheduler.messages import (
    Delivery,
    SequenceEnd,
    SequenceSubmit,
    Submission,
    TokenColumns,
    Verdict,
)
from services.scheduler.outbox import Outbox, OutboxLimits
from shared.block_hashes import HASH_BYTES
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.rpc import Server, build_server
from shared.wire import (
    failure_to_proto,
    load_to_proto,
    logprobs_to_proto,
    replay_from_proto,
    sampling_from_proto,
    stats_to_proto,
    unpack_ids,
)

Context: TypeAlias = grpc.aio.ServicerContext
ConnectRequest: TypeAlias = scheduler_pb2.SchedulerServiceConnectRequest
ConnectResponse: TypeAlias = scheduler_pb2.SchedulerServiceConnectResponse
GenerateResponse: TypeAlias = scheduler_pb2.SchedulerServiceGenerateResponse

SERVICE_NAME: Final = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
CACHE_SERVICE_NAME: Final = scheduler_pb2.DESCRIPTOR.services_by_name[
    "PrefixCacheService"
].full_name
# A 1M-token prompt is 4 MiB; one message may bring several.
MAX_RECEIVE_MIB: Final = 64
# Of a message about prefix caches: a quarter of a megabyte.
MAX_CACHE_ENTRIES: Final = 4096
NO_HASH: Final = bytes(HASH_BYTES)
# Twice as often as the contract promises.
LIFE_SIGN_S: Final = 0.5

_ABORT_REASONS: Final = {int(reason): reason for reason in AbortReason}


def build_scheduler_server(address: str, engine: Engine, limits: OutboxLimits) -> Server:
    """A server of `SchedulerService` and `PrefixCacheService` at `address`, not started."""
    server = build_server(address=address, max_receive_mib=MAX_RECEIVE_MIB)
    servicer = SchedulerServicer(engine, limits)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    caches = PrefixCacheServicer(engine)
    scheduler_pb2_grpc.add_PrefixCacheServiceServicer_to_server(caches, server)
    return server


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves `SchedulerService`."""

    def __init__(self, engine: Engine, limits: OutboxLimits) -> None:
        """Keep the engine that all calls share."""
        self._engine = engine
        self._limits = limits

    async def Connect(self, request_iterator: object, context: Context) -> None:
        """Serve one detokenizer until its stream ends."""
        await _Connection(self._engine, self._limits, context).run()

    async def Generate(
        self, request: scheduler_pb2.SchedulerServiceGenerateRequest, context: Context
    ) -> None:
        """Serve one request until its last sequence has ended."""
        submission = submission_from_proto(request.submit)
        stream_ids = [sequence.stream_id for sequence in submission.sequences]
        _check_stream_ids(stream_ids, ())
        outbox: Outbox[GenerateResponse] = Outbox(self._limits)
        num_open = len(stream_ids)
        prepared: asyncio.Future[list[Verdict]] = asyncio.get_running_loop().create_future()

        def deliver(delivery: Delivery) -> None:
            nonlocal num_open
            if delivery.verdicts:
                prepared.set_result(delivery.verdicts)
                return
            message = delivery_to_proto(delivery)
            outbox.put(GenerateResponse(tokens=message.tokens, ends=message.ends))
            num_open -= len(delivery.ends)
            if not num_open:
                outbox.complete()

        outlet = self._engine.open_outlet(deliver)
        try:
            verdicts = self._engine.submit(_within(submission, context), outlet) or await prepared
            for verdict in verdicts:
                if verdict.refusal is not None:
                    raise verdict.refusal
            await context.send_initial_metadata(())
            await outbox.write_all(context.write)
        finally:
            self._engine.close_outlet(outlet)

    async def Abort(
        self, request: scheduler_pb2.SchedulerServiceAbortRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceAbortResponse:
        """End a request by its id."""
        count = self._engine.abort_request(request.request_id)
        return scheduler_pb2.SchedulerServiceAbortResponse(num_aborted=count)

    async def WatchLoad(
        self, request: scheduler_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.WatchLoadResponse]:
        """Follow the load."""
        async for load in self._engine.watch_load():
            yield scheduler_pb2.WatchLoadResponse(load=load_to_proto(load))


class PrefixCacheServicer(scheduler_pb2_grpc.PrefixCacheServiceServicer):
    """Serves `PrefixCacheService`."""

    def __init__(self, engine: Engine) -> None:
        """Keep the engine; numbers of another run of it mean nothing here."""
        self._engine = engine

    async def WatchCache(
        self, request: scheduler_pb2.WatchCacheRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.WatchCacheResponse]:
        """Follow the prefix caches."""
        is_known = request.instance_id == self._engine.instance_id
        # A caller that waits for the first change knows by this that it is heard.
        await context.send_initial_metadata(())
        async for update in self._engine.watch_cache(request.number if is_known else None):
            digest, block_size = self._engine.block_naming
            for part in cache_parts(update):
                part.instance_id = self._engine.instance_id
                part.model_digest, part.block_size_tokens = digest, block_size
                yield part

    async def ResetCache(
        self, request: scheduler_pb2.ResetCacheRequest, context: Context
    ) -> scheduler_pb2.ResetCacheResponse:
        """Share nothing that was computed so far."""
        return scheduler_pb2.ResetCacheResponse(num_blocks=self._engine.reset_prefix_cache())


def cache_parts(update: CacheUpdate) -> Iterator[scheduler_pb2.WatchCacheResponse]:
    """An update as messages of bounded size; a snapshot is one message at least."""
    if update.snapshot is not None:
        blocks = update.snapshot
        for start in range(0, max(1, len(blocks)), MAX_CACHE_ENTRIES):
            piece = blocks[start : start + MAX_CACHE_ENTRIES]
            snapshot = scheduler_pb2.CacheSnapshot(
                number=update.number,
                is_first=start == 0,
                is_last=start + MAX_CACHE_ENTRIES >= len(blocks),
                replicas=[block.replica for block in piece],
                block_hashes=b"".join(block.block_hash for block in piece),
                parent_hashes=b"".join(block.parent_hash for block in piece),
            )
            yield scheduler_pb2.WatchCacheResponse(snapshot=snapshot)
    for start in range(0, len(update.events), MAX_CACHE_ENTRIES):
        found = update.events[start : start + MAX_CACHE_ENTRIES]
        events = scheduler_pb2.CacheEvents(
            first_number=found[0].number,
            changes=[int(event.change) for event in found],  # type: ignore[misc]  # enums are ints
            replicas=[event.replica for event in found],
            block_hashes=b"".join(event.block_hash or NO_HASH for event in found),
            parent_hashes=b"".join(event.parent_hash or NO_HASH for event in found),
        )
        yield scheduler_pb2.WatchCacheResponse(events=events)


class _Connection:
    """One `Connect` stream: a reader, a writer and a task that follows the load."""

    def __init__(self, engine: Engine, limits: OutboxLimits, context: Context) -> None:
        """An outlet of its own."""
        self._engine = engine
        self._context = context
        self._outbox: Outbox[ConnectResponse] = Outbox(limits)
        self._outlet = engine.open_outlet(self._deliver)

    async def run(self) -> None:
        """Serve until the peer goes or breaks the contract; its sequences end then."""
        try:
            # Alone and first: a status cannot follow a first write that was cancelled half-way.
            await self._context.send_initial_metadata(())
            await _until_first_ends(
                self._read(),
                self._follow_load(),
                self._tell_life(),
                self._outbox.write_all(self._context.write),
            )
        finally:
            self._engine.close_outlet(self._outlet)

    def _deliver(self, delivery: Delivery) -> None:
        self._outbox.put(delivery_to_proto(delivery))

    async def _read(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            self._take(request)

    def _take(self, request: ConnectRequest) -> None:
        verdicts: list[Verdict] = []
        for message in request.submits:
            stream_ids = [sequence.stream_id for sequence in message.sequences]
            outlet = self._outlet
            _check_stream_ids(stream_ids, outlet.sequences.keys() | outlet.preparing.keys())
            verdicts += self._submit(message)
        if verdicts:
            self._outbox.put(ConnectResponse(verdicts=map(verdict_to_proto, verdicts)))
        for abort in request.aborts:
            reason = _ABORT_REASONS.get(abort.reason, AbortReason.CANCELLED)
            self._engine.abort(self._outlet, abort.stream_id, reason, abort.num_tokens_kept)

    def _submit(self, message: scheduler_pb2.TokenSubmit) -> list[Verdict]:
        try:
            submission = submission_from_proto(message)
        except RequestError as error:
            return [Verdict(stream_id=s.stream_id, refusal=error) for s in message.sequences]
        return self._engine.submit(submission, self._outlet)

    async def _follow_load(self) -> None:
        async for load in self._engine.watch_load():
            self._outbox.put(ConnectResponse(load=load_to_proto(load)))

    async def _tell_life(self) -> None:
        """Empty messages: a client can tell who waits from who stands still."""
        while True:
            await asyncio.sleep(LIFE_SIGN_S)
            self._outbox.put(ConnectResponse())


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


def submission_from_proto(message: scheduler_pb2.TokenSubmit) -> Submission:
    """A message as a submission; RequestError when its columns do not fit together."""
    return Submission(
        request_id=message.request_id,
        sequences=tuple(map(_sequence_from_proto, message.sequences)),
        sampling=sampling_from_proto(message.sampling),
        traceparent=message.traceparent,
        priority=message.priority,
        timeout_ms=message.timeout_ms,
        cache_salt=message.cache_salt,
        tenant_id=message.tenant_id,
        first_token_timeout_ms=message.first_token_timeout_ms,
    )


def verdict_to_proto(verdict: Verdict) -> scheduler_pb2.Verdict:
    """A verdict as its message."""
    refusal = None if verdict.refusal is None else failure_to_proto(verdict.refusal)
    return scheduler_pb2.Verdict(stream_id=verdict.stream_id, refusal=refusal)


def delivery_to_proto(delivery: Delivery) -> ConnectResponse:
    """Tokens and ends as one message."""
    return ConnectResponse(
        verdicts=map(verdict_to_proto, delivery.verdicts),
        tokens=None if delivery.tokens is None else _columns_to_proto(delivery.tokens),
        ends=map(_end_to_proto, delivery.ends),
    )


def _sequence_from_proto(message: common_pb2.SequenceSpec) -> SequenceSubmit:
    return SequenceSubmit(
        stream_id=message.stream_id,
        index=message.index,
        prompt_token_ids=unpack_ids(message.prompt_token_ids, "prompt_token_ids"),
        output_token_ids=unpack_ids(message.output_token_ids, "output_token_ids"),
        seed=message.seed,
        replay=replay_from_proto(message.replay) if message.HasField("replay") else None,
    )


def _columns_to_proto(columns: TokenColumns) -> scheduler_pb2.TokenColumns:
    return scheduler_pb2.TokenColumns(
        stream_ids=columns.stream_ids,
        num_previous_tokens=columns.num_previous_tokens,
        num_tokens=columns.num_tokens,
        token_ids=columns.token_ids.tobytes(),
        logprobs=logprobs_to_proto(columns.logprobs),
        starts=[
            scheduler_pb2.SequenceStart(stream_id=stream_id, stats=stats_to_proto(stats))
            for stream_id, stats in columns.starts
        ],
        num_drafted_tokens=columns.num_drafted_tokens,
        num_accepted_tokens=columns.num_accepted_tokens,
        prompt_logprobs=[
            scheduler_pb2.PromptLogprobs(
                stream_id=stream_id, start=start, logprobs=logprobs_to_proto(entries)
            )
            for stream_id, start, entries in columns.prompt_logprobs
        ],
    )


def _end_to_proto(end: SequenceEnd) -> scheduler_pb2.SequenceEnd:
    if end.finish_reason is None:
        assert end.failure is not None, "an end has a reason"
        return scheduler_pb2.SequenceEnd(
            stream_id=end.stream_id, failed=failure_to_proto(end.failure)
        )
    return scheduler_pb2.SequenceEnd(
        stream_id=end.stream_id,
        finished=scheduler_pb2.SequenceFinished(
            reason=int(end.finish_reason),  # type: ignore[arg-type]  # enum values are ints there
            stop_token_id=end.stop_token_id,
            stats=stats_to_proto(end.stats),
        ),
    )


def _within(submission: Submission, context: Context) -> Submission:
    """The submission with the call's own deadline as its time limit, where that is earlier."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return submission
    remaining_ms = max(1, math.floor(remaining_s * 1000))
    timeout_ms = min(submission.timeout_ms or remaining_ms, remaining_ms)
    return dataclasses.replace(submission, timeout_ms=timeout_ms)


def _check_stream_ids(stream_ids: list[int], live: Collection[int]) -> None:
    """Raise when a submit could not be answered: by no verdict, or by one of another sequence."""
    is_distinct = len(set(stream_ids)) == len(stream_ids)
    if not stream_ids or not is_distinct or any(s in live for s in stream_ids):
        listed = ", ".join(map(str, stream_ids[:8])) or "of a request without sequences"
        raise RequestError(
            FailureReason.INVALID_ARGUMENT,
            f"stream_ids {listed} must be given, distinct and not in use",
            field="stream_ids",
        )
