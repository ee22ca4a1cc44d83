"""A scheduler for the tests: it admits everything and emits each sequence's replay script.

With `is_manual` it does nothing by itself; the test sends messages. With `max_sent` a sequence gets
no more tokens than that until the test takes the limit away.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from protos.glm.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from shared.rpc import build_server
from shared.wire import pack_ids, unpack_ids

Response = scheduler_pb2.SchedulerServiceConnectResponse
MAX_TOKENS_SENT = 10_000


@dataclass
class Running:
    """A sequence and what is left of its script."""

    stream_id: int
    request_id: str
    script: list[int]
    step: int
    eos: int
    num_sent: int = 0
    has_logprobs: bool = False


@dataclass
class FakeScheduler(
    scheduler_pb2_grpc.SchedulerServiceServicer, scheduler_pb2_grpc.PrefixCacheServiceServicer
):
    """One process; `submits` and `aborts` remember what came."""

    is_manual: bool = False
    pause_s: float = 0.0
    max_sent: int | None = None
    submits: list[scheduler_pb2.TokenSubmit] = field(default_factory=list)
    aborts: list[scheduler_pb2.AbortSequence] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)
    num_connections: int = 0
    num_resets: int = 0
    # What it says of itself; one without a name of its run gives no signs of life.
    load: dict[str, Any] = field(default_factory=dict)
    outgoing: Any = None
    context: Any = None

    async def Connect(self, request_iterator: object, context: Any) -> None:
        self.num_connections += 1
        self.running.clear()
        self.outgoing, self.context = asyncio.Queue(), context
        told = {"num_running": 7, "max_model_len": 100, "is_worker_ready": True, **self.load}
        await context.write(Response(load=common_pb2.LoadSnapshot(**told)))
        reader, stepper = (
            asyncio.create_task(self._read(context)),
            asyncio.create_task(self._step()),
        )
        try:
            while True:
                waiting = asyncio.ensure_future(self.outgoing.get())
                done, _ = await asyncio.wait({waiting, reader}, return_when="FIRST_COMPLETED")
                if waiting not in done:
                    waiting.cancel()
                    return
                await context.write(waiting.result())
        finally:
            for task in (reader, stepper):
                task.cancel()

    async def ResetCache(
        self, request: scheduler_pb2.ResetCacheRequest, context: Any
    ) -> scheduler_pb2.ResetCacheResponse:
        self.num_resets += 1
        return scheduler_pb2.ResetCacheResponse(num_blocks=5)

    def send(self, message: Response) -> None:
        self.outgoing.put_nowait(message)

    async def _read(self, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            for submit in request.submits:
                self.submits.append(submit)
                if not self.is_manual:
                    self._admit(submit)
            for abort in request.aborts:
                self.aborts.append(abort)
                sequence = self.running.pop(abort.stream_id, None)
                if sequence is not None:
                    self.send(Response(ends=[ended(sequence.stream_id, reason=3)]))

    def _admit(self, submit: scheduler_pb2.TokenSubmit) -> None:
        verdicts = []
        for sequence in submit.sequences:
            script = list(unpack_ids(sequence.replay.token_ids, "replay"))
            self.running[sequence.stream_id] = Running(
                sequence.stream_id,
                submit.request_id,
                script,
                (list(sequence.replay.tokens_per_step) or [1])[0],
                submit.sampling.eos_token_ids[0],
                num_sent=len(sequence.output_token_ids) // 4,
                has_logprobs=submit.sampling.HasField("num_logprobs"),
            )
            verdicts.append(scheduler_pb2.Verdict(stream_id=sequence.stream_id))
        self.send(Response(verdicts=verdicts))

    async def _step(self) -> None:
        """One message per step with the tokens of all sequences."""
        while True:
            await asyncio.sleep(self.pause_s)
            parts, ends = [], []
            for sequence in list(self.running.values()):
                start = sequence.num_sent
                run = sequence.script[start : start + sequence.step][: self._room(start)]
                if not run and self.max_sent is not None:
                    continue
                sequence.num_sent += len(run)
                if sequence.num_sent >= len(sequence.script):
                    run = [*run, sequence.eos]
                    count = sequence.num_sent + 1
                    ends.append(ended(sequence.stream_id, num_output_tokens=count))
                    del self.running[sequence.stream_id]
                parts.append((sequence, start, run))
            if parts:
                self.send(Response(tokens=columns(parts), ends=ends))

    def _room(self, num_sent: int) -> int | None:
        return None if self.max_sent is None else max(0, self.max_sent - num_sent)


def columns(parts: list[tuple[Running, int, list[int]]]) -> scheduler_pb2.TokenColumns:
    count = sum(len(run) for sequence, _, run in parts if sequence.has_logprobs)
    logprobs = None
    if count:
        logprobs = common_pb2.LogprobColumns(
            sampled_logprobs=b"\0\0\0\xbf" * count,  # -0.5
            sampled_ranks=pack_ids([1] * count),
            num_top_logprobs=[0] * count,
        )
    return scheduler_pb2.TokenColumns(
        stream_ids=[sequence.stream_id for sequence, _, _ in parts],
        num_previous_tokens=[start for _, start, _ in parts],
        num_tokens=[len(run) for _, _, run in parts],
        token_ids=pack_ids([token for _, _, run in parts for token in run]),
        logprobs=logprobs,
    )


def ended(
    stream_id: int, *, reason: int = 1, num_output_tokens: int = 0
) -> scheduler_pb2.SequenceEnd:
    stats = common_pb2.SequenceStats(num_output_tokens=num_output_tokens, num_cached_tokens=1)
    return scheduler_pb2.SequenceEnd(
        stream_id=stream_id,
        finished=scheduler_pb2.SequenceFinished(reason=reason, stats=stats),  # type: ignore[arg-type]  # a number of the enum
    )


async def serve_scheduler(fake: FakeScheduler, address: str) -> grpc.aio.Server:
    server = build_server(address=address, max_receive_mib=64)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    scheduler_pb2_grpc.add_PrefixCacheServiceServicer_to_server(fake, server)
    await server.start()
    return server
