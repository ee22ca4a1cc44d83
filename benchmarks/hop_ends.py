"""Both ends of every hop of the mesh: the doors and clients of the services, nothing behind them.

A *server* makes `num_steps` steps for `num_running` sequences, a *client* takes all of their
tokens; each prints its CPU time as its last line. What a message passes in the mesh is all here:
wire conversion, gRPC, event loop, threads. Text, sockets of clients, sequences and tensors are not.

    python -m benchmarks.hop_ends {server,client} HOP ADDRESS STEPS GAP_S RUNNING
"""

import asyncio
import json
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import uvloop

from protos.glm.v1 import (
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.detokenizer.messages import SequenceSpec, TokenSubmit
from services.detokenizer.placement import PlacementRules
from services.detokenizer.schedulers import ResumeLimits, Schedulers
from services.detokenizer.server import outgoing_to_proto
from services.detokenizer.session import Outgoing
from services.frontend import submission
from services.frontend.detokenizer_client import DetokenizerClient
from services.frontend.exchange import Exchange
from services.scheduler.engine import Engine
from services.scheduler.messages import Delivery, Submission, TokenColumns, Verdict
from services.scheduler.outbox import OutboxLimits
from services.scheduler.outlet import Outlet
from services.scheduler.plan import StepPlan as Order
from services.scheduler.server import SchedulerServicer
from services.scheduler.worker_client import WorkerClient
from services.worker.orders import LocalOrders
from services.worker.plan import Capacity, StepPlan, StepResult
from services.worker.prefill_spans import PrefillSpans
from services.worker.runner import Runner
from services.worker.server import WorkerServicer
from shared.rpc import Server, build_server, open_channel
from shared.sampling import LoadSnapshot, SamplingSpec
from shared.wire import pack_ids

# Both processes come to rest before the first step and after the last one.
SETTLE_S = 0.3
# A frame of a chat: a short piece of text in its JSON.
FRAME = b"data: " + b"x" * 200 + b"\n\n"
TOKEN_ID = 1000


@dataclass
class Work:
    """How much is sent, and how fast."""

    num_steps: int
    gap_s: float
    num_running: int

    async def steps(self) -> AsyncIterator[int]:
        """Step numbers, each in its time; as fast as the reader takes them without a gap."""
        due = time.monotonic()
        for step in range(self.num_steps):
            due += self.gap_s
            await asyncio.sleep(max(0.0, due - time.monotonic()) if self.gap_s else 0)
            yield step


class Meter:
    """CPU time of this process between two moments."""

    def __init__(self) -> None:
        self._started = time.process_time()

    def start(self) -> None:
        """From now on."""
        self._started = time.process_time()

    def stop(self) -> None:
        """Print it."""
        sys.stdout.write(json.dumps({"cpu_s": time.process_time() - self._started}) + "\n")
        sys.stdout.flush()


class Counter:
    """A client's side of the work: knows when the first token came and the last."""

    def __init__(self, work: Work) -> None:
        self._missing = work.num_steps * work.num_running
        self._meter = Meter()
        self._done = asyncio.Event()

    def ready(self) -> None:
        """Everything is submitted."""
        self._meter.start()

    def take(self, count: int = 1) -> None:
        """Tokens have come."""
        self._missing -= count
        if not self._missing:
            self._meter.stop()
            self._done.set()

    async def wait(self) -> None:
        """Until all are there, and the other side has printed what it has to."""
        await self._done.wait()
        await asyncio.sleep(2 * SETTLE_S)


# -- one message per token: a stream per request, as peers do ------------------------------------


class TokenStreams(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Every request has its stream, every token its message."""

    def __init__(self, work: Work) -> None:
        self._work, self._meter, self._num_open = work, Meter(), 0

    async def Generate(self, request: object, context: grpc.aio.ServicerContext) -> None:
        """Tokens of one request."""
        self._num_open += 1
        await asyncio.sleep(SETTLE_S)
        self._meter.start()
        async for step in self._work.steps():
            columns = scheduler_pb2.TokenColumns(
                stream_ids=[1],
                num_previous_tokens=[step],
                num_tokens=[1],
                token_ids=pack_ids([TOKEN_ID]),
            )
            await context.write(scheduler_pb2.SchedulerServiceGenerateResponse(tokens=columns))
        self._num_open -= 1
        if not self._num_open:
            self._meter.stop()


async def read_token_streams(address: str, work: Work) -> None:
    """Read all streams."""
    counter = Counter(work)
    async with open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def read(call: grpc.aio.UnaryStreamCall) -> None:
            while (message := await call.read()) is not grpc.aio.EOF:
                counter.take(len(message.tokens.token_ids) // 4)

        request = scheduler_pb2.SchedulerServiceGenerateRequest()
        calls = [stub.Generate(request) for _ in range(work.num_running)]
        counter.ready()
        await asyncio.gather(*map(read, calls))
        await counter.wait()


# -- scheduler to detokenizer --------------------------------------------------------------------


class FeedingEngine:
    """Stands where the scheduler's engine does, and delivers a token to everyone in each step."""

    def __init__(self, work: Work) -> None:
        self._work, self._meter = work, Meter()
        self._stream_ids: list[int] = []
        self._sinks: list[Callable[[Delivery], None]] = []
        self._feeding: asyncio.Task[None] | None = None

    def open_outlet(self, sink: Callable[[Delivery], None]) -> Outlet:
        """One client."""
        self._sinks.append(sink)
        return Outlet()

    def close_outlet(self, outlet: Outlet) -> None:
        """It has gone."""

    def submit(self, submission: Submission, outlet: Outlet) -> list[Verdict]:
        """Admit; the steps begin when all are there."""
        self._stream_ids += [entry.stream_id for entry in submission.sequences]
        if len(self._stream_ids) == self._work.num_running:
            self._feeding = asyncio.create_task(self._feed())
        return [Verdict(stream_id=entry.stream_id) for entry in submission.sequences]

    async def watch_load(self) -> AsyncIterator[LoadSnapshot]:
        """It does not change."""
        yield LoadSnapshot()
        await asyncio.Event().wait()

    async def _feed(self) -> None:
        await asyncio.sleep(SETTLE_S)
        self._meter.start()
        count = len(self._stream_ids)
        async for step in self._work.steps():
            columns = TokenColumns(
                stream_ids=list(self._stream_ids),
                num_previous_tokens=[step] * count,
                num_tokens=[1] * count,
                token_ids=array("I", [TOKEN_ID] * count),
                logprobs=[],
            )
            self._sinks[0](Delivery(tokens=columns, ends=[]))
        await asyncio.sleep(SETTLE_S)
        self._meter.stop()


class TokenListener:
    """Counts the tokens of a sequence."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def on_verdict(self, position: int, refusal: object) -> None:
        """Admitted."""

    def on_tokens(self, position: int, num_previous: int, ids: list[int], logprobs: None) -> None:
        """New tokens."""
        self._counter.take(len(ids))

    def on_end(self, position: int, end: object) -> None:
        """The connection is closed."""


async def read_deliveries(address: str, work: Work) -> None:
    """The detokenizer's clients, without a detokenizer."""
    counter = Counter(work)
    client = Schedulers(
        [address],
        PlacementRules(),
        ResumeLimits(),
        on_reach=lambda _: None,
        on_load=lambda _: None,
    )
    running = asyncio.create_task(client.run())
    await _until(lambda: client.is_reached)
    counter.ready()
    for number in range(work.num_running):
        spec = SequenceSpec(index=0, prompt_token_ids=pack_ids([1]))
        submit = TokenSubmit(request_id=str(number), sequences=(spec,), sampling=SamplingSpec())
        client.submit(submit, cast("Any", TokenListener(counter)))
    await counter.wait()
    running.cancel()


# -- detokenizer to frontend ---------------------------------------------------------------------


class FrameServicer(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """Sends a frame to everyone in each step."""

    def __init__(self, work: Work) -> None:
        self._work, self._meter = work, Meter()

    async def Connect(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        """One frontend."""
        await context.write(detokenizer_pb2.DetokenizerServiceConnectResponse())
        stream_ids: list[int] = []
        while len(stream_ids) < self._work.num_running:
            stream_ids += [submit.stream_id for submit in (await context.read()).submits]
        reading = asyncio.create_task(self._read(context))
        await asyncio.sleep(SETTLE_S)
        self._meter.start()
        async for _ in self._work.steps():
            frames = [(stream_id, FRAME) for stream_id in stream_ids]
            for message in outgoing_to_proto(Outgoing(frames=frames)):
                await context.write(message)
        await asyncio.sleep(SETTLE_S)
        self._meter.stop()
        await reading

    async def _read(self, context: grpc.aio.ServicerContext) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass


async def read_frames(address: str, work: Work) -> None:
    """The frontend's client, without sockets."""
    counter = Counter(work)
    client = DetokenizerClient(address, credit_bytes=1 << 20)
    running = asyncio.create_task(client.run())
    await _until(lambda: client.is_connected)
    counter.ready()
    for number in range(work.num_running):
        exchange = client.submit(_text_submission(number))

        def sink(data: bytes, exchange: Exchange = exchange) -> bool:
            client.give_credit(exchange, len(data))
            counter.take()
            return True

        exchange.sink = sink
    await counter.wait()
    running.cancel()


def _text_submission(number: int) -> submission.Submission:
    return submission.Submission(
        request_id=str(number),
        sequences=(submission.SequencePlan(index=0, prompt_token_ids=[1], seed=0),),
        sampling=SamplingSpec(),
        output=submission.OutputPlan(
            object_kind=submission.ObjectKind.CHAT_COMPLETION,
            response_id=str(number),
            model="tiny",
            created_s=0,
        ),
    )


# -- scheduler to worker and back ----------------------------------------------------------------


class EchoExecutor:
    """Answers every plan at once with a token per row."""

    def __init__(self, work: Work) -> None:
        self._work, self._meter = work, Meter()
        self.capacity = Capacity(
            num_blocks=1 << 16,
            block_size=128,
            num_rows=2 * work.num_running,
            max_num_seqs=work.num_running,
            max_num_batched_tokens=4096,
            max_model_len=1 << 20,
            vocab_size=1 << 16,
            block_size_bytes=1,
        )

    def start_epoch(self, max_plans_in_flight: int) -> None:
        """There are no rows."""

    def take_memory(self) -> None:
        """Nothing."""

    def finish_step(self) -> None:
        """Nothing is prepared."""

    def num_rows_in_use(self) -> int:
        """None."""
        return 0

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        """Run one plan."""
        if plan.step == 1:
            self._meter.start()
        elif plan.step == self._work.num_steps:
            self._meter.stop()
        ones = np.ones(len(plan.rows), np.int64)
        return StepResult(
            step=plan.step,
            rows=plan.rows,
            num_computed_tokens=plan.num_computed_tokens,
            num_sampled_tokens=ones,
            sampled_token_ids=TOKEN_ID * ones,
            finish_codes=0 * ones,
        )


def worker_door(work: Work) -> WorkerServicer:
    """The worker's door, its runner's thread behind it."""
    orders = LocalOrders()
    runner = Runner(lambda: EchoExecutor(work), orders)
    runner.start()
    return WorkerServicer(runner, orders, PrefillSpans())


async def send_plans(address: str, work: Work) -> None:
    """The scheduler's client, without a scheduler: a plan, its result, the next plan."""
    counter = Counter(work)
    session = await WorkerClient(address, scheduler_id="hop").open(1)
    await asyncio.sleep(SETTLE_S)
    counter.ready()
    rows = list(range(work.num_running))
    async for step in work.steps():
        await session.send(
            Order(
                step=step + 1,
                rows=list(rows),
                num_scheduled_tokens=[1] * len(rows),
                num_computed_tokens=[step] * len(rows),
                num_new_blocks=[0] * len(rows),
                new_blocks=array("I"),
                new_sequences=[],
                freed_rows=[],
            )
        )
        counter.take(len((await session.receive()).token_ids))
    await counter.wait()
    await session.close()


# -- the two processes ---------------------------------------------------------------------------

SERVERS: dict[str, Callable[[Work, Server], None]] = {
    "token_messages": lambda work, server: (
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(TokenStreams(work), server)
    ),
    "worker": lambda work, server: worker_door(work).add_to(server),
    "scheduler": lambda work, server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
        SchedulerServicer(cast("Engine", FeedingEngine(work)), OutboxLimits()), server
    ),
    "detokenizer": lambda work, server: (
        detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(FrameServicer(work), server)
    ),
}
CLIENTS = {
    "token_messages": read_token_streams,
    "worker": send_plans,
    "scheduler": read_deliveries,
    "detokenizer": read_frames,
}


async def _serve(hop: str, address: str, work: Work) -> None:
    server = build_server(address=address)
    SERVERS[hop](work, server)
    await server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.wait_for_termination()


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  # other tasks change it
        await asyncio.sleep(0.01)


def main(argv: list[str]) -> int:
    """One process of a hop."""
    end, hop, address, num_steps, gap_s, num_running = argv
    work = Work(int(num_steps), float(gap_s), int(num_running))
    uvloop.run(_serve(hop, address, work) if end == "server" else CLIENTS[hop](address, work))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
