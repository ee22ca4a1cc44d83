"""A scheduler process in this event loop, with a fake worker behind it on a unix socket."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio
import pytest

from protos.glm.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.health import probe
from shared.rpc import open_channel
from shared.wire import pack_ids, unpack_floats, unpack_ids
from tests.services.scheduler.fake_worker import FakeWorker, serve_worker
from tests.services.scheduler.simulated_worker import expected_token

# Against hanging, not about speed.
LIMIT_S = 60.0


@dataclass
class Received:
    """What came back for one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    wants_logprobs: bool = False
    starts: list[common_pb2.SequenceStats] = field(default_factory=list)
    verdict: scheduler_pb2.Verdict | None = None
    end: scheduler_pb2.SequenceEnd | None = None


class Peer:
    """A detokenizer's side of one Connect stream; checks order and gaplessness as it reads."""

    def __init__(self, stub: scheduler_pb2_grpc.SchedulerServiceStub) -> None:
        self.call = stub.Connect()
        self.received: dict[int, Received] = {}
        self.load: common_pb2.LoadSnapshot | None = None

    async def submit(self, *submits: scheduler_pb2.TokenSubmit) -> None:
        for submit in submits:
            for sequence in submit.sequences:
                wants_logprobs = submit.sampling.HasField("num_logprobs")
                self.received[sequence.stream_id] = Received(wants_logprobs=wants_logprobs)
        await self.call.write(scheduler_pb2.SchedulerServiceConnectRequest(submits=submits))

    async def abort(self, *stream_ids: int, reason: int = 1, num_tokens_kept: int = 0) -> None:
        aborts = [
            scheduler_pb2.AbortSequence(
                stream_id=stream_id, reason=reason, num_tokens_kept=num_tokens_kept
            )
            for stream_id in stream_ids
        ]
        await self.call.write(scheduler_pb2.SchedulerServiceConnectRequest(aborts=aborts))

    async def read(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            message = await self.call.read()
        if message is grpc.aio.EOF:
            raise EOFError
        take(message, self.received)
        if message.HasField("load"):
            self.load = message.load

    async def read_for_ever(self) -> None:
        while True:
            await self.read()

    async def read_until_ended(self, *stream_ids: int) -> None:
        while not all(
            self.received[s].end
            or (self.received[s].verdict and self.received[s].verdict.HasField("refusal"))
            for s in stream_ids
        ):
            await self.read()

    async def read_until_tokens(self, stream_id: int, count: int) -> None:
        while len(self.received[stream_id].tokens) < count:
            await self.read()


def take(
    message: scheduler_pb2.SchedulerServiceConnectResponse
    | scheduler_pb2.SchedulerServiceGenerateResponse,
    received: dict[int, Received],
) -> None:
    """Note a message; assertions hold the order of its parts against the contract."""
    for verdict in getattr(message, "verdicts", ()):
        assert received[verdict.stream_id].verdict is None
        received[verdict.stream_id].verdict = verdict
    columns = message.tokens
    for start in columns.starts:
        received[start.stream_id].starts.append(start.stats)
    tokens = unpack_ids(columns.token_ids, "token_ids")
    logprobs = unpack_floats(columns.logprobs.sampled_logprobs, "sampled_logprobs")
    asked = [s for s in columns.stream_ids if received[s].wants_logprobs]
    assert bool(logprobs) == bool(asked)
    for place, stream_id in enumerate(asked):  # one token each: nothing is drafted here
        received[stream_id].logprobs.append(logprobs[place])
    start = 0
    for stream_id, previous, count in zip(
        columns.stream_ids, columns.num_previous_tokens, columns.num_tokens, strict=True
    ):
        entry = received[stream_id]
        assert entry.end is None, "tokens after the end"
        assert previous == len(entry.tokens), "a gap"
        entry.tokens += tokens[start : start + count]
        start += count
    assert start == len(tokens)
    for end in message.ends:
        assert received[end.stream_id].end is None, "two ends"
        received[end.stream_id].end = end


def sequence(stream_id: int, num_prompt: int = 5, *, seed: int | None = None, index: int = 0):  # noqa: ANN201
    return common_pb2.SequenceSpec(
        stream_id=stream_id,
        index=index,
        prompt_token_ids=pack_ids(range(1, num_prompt + 1)),
        seed=stream_id if seed is None else seed,
    )


def submit(
    request_id: str,
    *sequences: common_pb2.SequenceSpec,
    max_tokens: int = 8,
    num_logprobs: int | None = None,
    timeout_ms: int = 0,
    priority: int = 0,
    traceparent: str = "",
) -> scheduler_pb2.TokenSubmit:
    return scheduler_pb2.TokenSubmit(
        request_id=request_id,
        sequences=sequences,
        sampling=common_pb2.SamplingParams(
            temperature=1,
            top_p=1,
            repetition_penalty=1,
            max_tokens=max_tokens,
            eos_token_ids=[7],
            num_logprobs=num_logprobs,
        ),
        timeout_ms=timeout_ms,
        priority=priority,
        traceparent=traceparent,
    )


def expected(seed: int, num_prompt: int, count: int) -> list[int]:
    """The tokens of an undisturbed run."""
    return [expected_token(seed, num_prompt + n) for n in range(count)]


class Running:
    """A scheduler process and its fake worker."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.worker = FakeWorker()
        self.worker_address = f"unix:{folder}/w"
        self.address = f"unix:{folder}/s"
        self.health_address = f"unix:{folder}/h"
        self.admin_address = f"unix:{folder}/a"
        self.stop = asyncio.Event()
        self.service: SchedulerService | None = None
        self._task: asyncio.Task[None] | None = None
        self._worker_server: grpc.aio.Server | None = None
        self.channel: grpc.aio.Channel | None = None
        self._narrow: grpc.aio.Channel | None = None

    async def start(self, *, with_worker: bool = True, **changes: object) -> None:
        if with_worker:
            await self.start_worker()
        settings = SchedulerSettings(
            address=self.address,
            health_address=self.health_address,
            admin_address=self.admin_address,
            worker_address=[self.worker_address],
            **changes,
        )
        self.service = SchedulerService(settings)
        self._task = asyncio.create_task(self.service.run(self.stop))
        self.channel = open_channel(self.address)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        # A call on a channel that is still connecting fails where that takes long.
        await asyncio.wait_for(self.channel.channel_ready(), LIMIT_S)
        if with_worker:
            await self.wait_for_health("SERVING")

    async def start_worker(self) -> None:
        self._worker_server = await serve_worker(self.worker, self.worker_address)

    async def kill_worker(self) -> None:
        """The worker goes as a killed process does: at once, nothing said."""
        server, self._worker_server = self._worker_server, None
        assert server is not None
        await server.stop(0)

    async def wait_for_health(self, status: str, service: str = "") -> None:
        async with asyncio.timeout(LIMIT_S):
            while await probe(self.health_address, service=service) != status:  # noqa: ASYNC110  # another thread
                await asyncio.sleep(0.02)

    async def load(self) -> common_pb2.LoadSnapshot:
        call = self.stub.WatchLoad(scheduler_pb2.WatchLoadRequest())
        try:
            return (await call.read()).load
        finally:
            call.cancel()

    async def wait_until_idle(self) -> common_pb2.LoadSnapshot:
        """Wait until nothing is live and every block is free."""
        return await self.wait_for_load(
            lambda load: (
                not (load.num_running or load.num_waiting)
                and load.num_free_blocks == load.num_total_blocks
            )
        )

    async def wait_for_load(
        self, condition: Callable[[common_pb2.LoadSnapshot], bool]
    ) -> common_pb2.LoadSnapshot:
        async with asyncio.timeout(LIMIT_S):
            while not condition(load := await self.load()):  # noqa: ASYNC110  # asked each time
                await asyncio.sleep(0.02)
            return load

    def peer(self) -> Peer:
        return Peer(self.stub)

    def narrow_peer(self) -> Peer:
        """One for whom gRPC takes little on its own, whatever it makes of the connection."""
        options = [("grpc.http2.bdp_probe", 0)]
        self._narrow = grpc.aio.insecure_channel(self.address, options=options)
        return Peer(scheduler_pb2_grpc.SchedulerServiceStub(self._narrow))

    async def end(self) -> None:
        if self._narrow is not None:
            await self._narrow.close()
        if self.channel is not None:
            await self.channel.close()
        self.stop.set()
        if self._task is not None:
            await self._task
        if self._worker_server is not None:
            await self._worker_server.stop(0)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    folder = tempfile.mkdtemp(prefix="glm-")  # short: socket paths are
    process = Running(folder)
    yield process
    process.worker.gate.set()
    await process.end()
    shutil.rmtree(folder)
