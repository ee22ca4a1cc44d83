"""Fixtures: a small vocabulary, and a detokenizer process in this loop behind a unix socket."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from protos.glm.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from services.detokenizer.service import DetokenizerService
from services.detokenizer.settings import DetokenizerSettings
from shared.glm.dialect import Dialect
from shared.glm.tokenizer import Vocabulary
from shared.rpc import open_channel
from shared.wire import pack_ids
from tests.services.detokenizer.fake_scheduler import FakeScheduler, serve_scheduler
from tests.services.detokenizer.words import VOCABULARY

NANO = Path(__file__).resolve().parents[3] / "models" / "glm-nano"
# Against hanging, not about speed.
LIMIT_S = 60.0
Request = detokenizer_pb2.DetokenizerServiceConnectRequest


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return VOCABULARY


@dataclass
class Answer:
    """What a frontend got for one request."""

    verdict: detokenizer_pb2.TextVerdict | None = None
    data: bytes = b""
    end: detokenizer_pb2.TextEnd | None = None

    @property
    def is_over(self) -> bool:
        return self.end is not None or (
            self.verdict is not None and self.verdict.HasField("refusal")
        )


class Frontend:
    """A frontend's side of one Connect stream; checks the order of everything as it reads."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).Connect()
        self.answers: dict[int, Answer] = {}
        self.load: common_pb2.LoadSnapshot | None = None
        self.num_messages = 0
        self.is_told_of_drain = False

    async def submit(self, *submits: tuple[int, Any], credit: int = 1 << 20) -> None:
        for stream_id, _ in submits:
            self.answers[stream_id] = Answer()
        await self.call.write(
            Request(
                submits=[
                    detokenizer_pb2.ConnectSubmit(
                        stream_id=stream_id, submit=submit, initial_credit_bytes=credit
                    )
                    for stream_id, submit in submits
                ]
            )
        )

    async def abort(self, *stream_ids: int) -> None:
        await self.call.write(Request(aborted_stream_ids=stream_ids))

    async def give_credit(self, **num_bytes: int) -> None:
        ids = [int(name.removeprefix("stream_")) for name in num_bytes]
        credits = detokenizer_pb2.CreditColumns(stream_ids=ids, num_bytes=list(num_bytes.values()))
        await self.call.write(Request(credits=credits))

    async def read(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            message = await self.call.read()
        if message is grpc.aio.EOF:
            raise EOFError
        self.num_messages += 1
        self.is_told_of_drain = message.is_draining
        for verdict in message.verdicts:
            assert self.answers[verdict.stream_id].verdict is None
            self.answers[verdict.stream_id].verdict = verdict
        start = 0
        for stream_id, size in zip(
            message.frames.stream_ids, message.frames.num_bytes, strict=True
        ):
            answer = self.answers[stream_id]
            assert answer.verdict is not None
            assert answer.end is None
            answer.data += message.frames.data[start : start + size]
            start += size
        assert start == len(message.frames.data)
        for end in message.ends:
            assert self.answers[end.stream_id].end is None
            self.answers[end.stream_id].end = end
        if message.HasField("load"):
            self.load = message.load

    async def read_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            await self.read()

    async def read_until_over(self, *stream_ids: int) -> None:
        await self.read_until(lambda: all(self.answers[i].is_over for i in stream_ids))


@dataclass
class Mesh:
    """A detokenizer between a fake scheduler and the test."""

    folder: Path
    dialect: Dialect
    scheduler: FakeScheduler
    settings: DetokenizerSettings
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    channel: Any = None
    scheduler_server: Any = None
    task: Any = None
    # A further scheduler, where the settings name one; nobody starts it but the test.
    second: FakeScheduler = field(default_factory=FakeScheduler)
    second_server: Any = None
    schedulers: Any = None

    @property
    def scheduler_address(self) -> str:
        return f"unix:{self.folder}/s.sock"

    async def start_second(self) -> None:
        self.second_server = await serve_scheduler(self.second, f"unix:{self.folder}/s2.sock")

    def submit(
        self, text: str, *, num_sequences: int = 1, step: int = 1, **fields: Any
    ) -> detokenizer_pb2.TextSubmit:
        """A request whose answer the fake scheduler makes from `text`."""
        sampling = fields.pop("sampling", {})
        top = {name: fields.pop(name) for name in ("timeout_ms", "traceparent") if name in fields}
        spec = {
            "object_kind": 1,
            "response_id": "chatcmpl-1",
            "model": "glm-nano",
            "parse_reasoning": True,
            "include_reasoning": True,
            "parallel_tool_calls": True,
        }
        script = common_pb2.ReplayScript(
            token_ids=pack_ids(self.dialect.encode(text, allow_control=True)),
            tokens_per_step=[step],
        )
        return detokenizer_pb2.TextSubmit(
            request_id="chatcmpl-1",
            sequences=[
                common_pb2.SequenceSpec(index=i, prompt_token_ids=pack_ids([1, 2]), replay=script)
                for i in range(num_sequences)
            ],
            sampling=common_pb2.SamplingParams(
                eos_token_ids=self.dialect.eos_token_ids, max_tokens=1000, **sampling
            ),
            output=detokenizer_pb2.OutputSpec(**{**spec, **fields}),
            **top,
        )

    def connect(self) -> Frontend:
        return Frontend(self.channel)

    @property
    def stub(self) -> detokenizer_pb2_grpc.DetokenizerServiceStub:
        return detokenizer_pb2_grpc.DetokenizerServiceStub(self.channel)

    async def start_scheduler(self) -> None:
        self.scheduler_server = await serve_scheduler(self.scheduler, self.scheduler_address)

    async def until_connected(self, num_connections: int = 1) -> None:
        async with asyncio.timeout(LIMIT_S):
            # It is connected once it has read the first message, a while after it was counted.
            while (  # noqa: ASYNC110  # a fake's counter
                self.scheduler.num_connections < num_connections or not self.schedulers.is_reached
            ):
                await asyncio.sleep(0.01)

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_true():  # noqa: ASYNC110  # any state of the fake
                await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def nano() -> Dialect:
    return Dialect.load(NANO)


@pytest.fixture
def mesh_settings() -> dict[str, Any]:
    """What a test wants to be different."""
    return {}


@pytest.fixture
async def mesh(nano: Dialect, mesh_settings: dict[str, Any]) -> AsyncIterator[Mesh]:
    """Started, with a scheduler that has been reached."""
    folder = Path(tempfile.mkdtemp(prefix="gd-"))
    settings = DetokenizerSettings(
        address=f"unix:{folder}/d.sock",
        health_address=f"unix:{folder}/h.sock",
        admin_address=f"unix:{folder}/a.sock",
        scheduler_address=[
            f"unix:{folder}/{name}.sock" for name in mesh_settings.pop("schedulers", ["s"])
        ],
        model=NANO,
        **{"drain_timeout_s": 1.0, **mesh_settings},
    )
    made = Mesh(folder, nano, FakeScheduler(), settings)
    await made.start_scheduler()
    service = DetokenizerService(settings)
    made.schedulers = service._schedulers
    made.task = asyncio.create_task(service.run(made.stop))
    try:
        async with open_channel(settings.address) as channel:
            made.channel = channel
            await made.until_connected()
            await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
            yield made
    finally:
        made.stop.set()
        await asyncio.wait_for(made.task, LIMIT_S)
        for server in (made.scheduler_server, made.second_server):
            if server is not None:
                await server.stop(0)
        shutil.rmtree(folder)
