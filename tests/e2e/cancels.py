"""Clients that leave at any moment, by every way out, and what a mesh holds when they are gone."""

import asyncio
import json
import random
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc.aio

from protos.glm.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    frontend_pb2,
    frontend_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from shared.rpc import open_channel
from tests.e2e.mesh import Mesh

# Long enough that no answer is whole before its client leaves, short enough to wait in a queue.
MAX_LIFE_S: Final = 0.15
NUM_AT_ONCE: Final = 24
OK: Final = b"HTTP/1.1 200 "
_PROMPTS: Final = ("Say hello", "Repeat: a b c", "What is 12 + 30?", "one two three " * 60)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the processes of a mesh hold."""

    live: Mapping[str, int]
    """Requests, sequences, rows."""
    tasks: Mapping[str, int]
    files: Mapping[str, int]
    """Open ones, sockets among them."""
    memory_mib: Mapping[str, float]


async def status_of(mesh: Mesh, service: str) -> admin_pb2.GetStatusResponse:
    """What one process tells."""
    async with open_channel(mesh.address(service, "admin_address")) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status: admin_pb2.GetStatusResponse = await stub.GetStatus(
            admin_pb2.GetStatusRequest(), timeout=30
        )
        return status


async def look(mesh: Mesh) -> Holdings:
    """Ask every process that answers; ranks that are led do as their leader."""
    live, tasks, files, memory = {}, {}, {}, {}
    for name, places in mesh.state()["services"].items():
        if "admin_address" not in places:
            continue
        status = await status_of(mesh, name)
        live[name], tasks[name] = status.num_live, status.num_tasks
        process = Path(f"/proc/{mesh.pid(name)}")
        files[name] = sum(1 for _ in (process / "fd").iterdir())
        pages = int((process / "statm").read_text().split()[1])
        memory[name] = pages * 4096 / 2**20
    return Holdings(live, tasks, files, memory)


class Crowd:
    """Clients that leave; one in twenty stays and looks at its answer."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        parts = urlsplit(mesh.url)
        self._place = (str(parts.hostname), int(parts.port or 0))
        self._mesh = mesh
        self._rng = random.Random(seed)
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._number = 0
        self.texts: set[str] = set()
        """What those who stayed got; all asked the same."""
        self.ways: dict[str, int] = {}

    async def run(self, count: int) -> None:
        """Let so many clients come and leave."""
        frontend = open_channel(self._mesh.address("frontend"))
        scheduler = open_channel(self._mesh.address("scheduler"))
        async with frontend, scheduler, asyncio.TaskGroup() as tasks:
            ways: dict[str, Callable[[], Awaitable[None]]] = {
                "half a head": lambda: self._leave(self._head(self._body())[:-9]),
                "half a body": lambda: self._leave(self._request()[:-9]),
                "no stream": lambda: self._leave(self._request(stream=False)),
                "stream": lambda: self._leave(self._request()),
                "choices": lambda: self._leave(self._request(n=self._rng.randint(2, 4))),
                "logprobs": lambda: self._leave(self._request(logprobs=True, top_logprobs=3)),
                "abort": lambda: self._abort(frontend),
                "tokens": lambda: self._cancel(scheduler),
            }
            for number in range(count):
                await self._slots.acquire()
                name = self._rng.choice(list(ways))
                self.ways[name] = self.ways.get(name, 0) + 1
                tasks.create_task(self._in_slot(ways[name]()))
                if number % 20 == 0:
                    await self._slots.acquire()
                    tasks.create_task(self._in_slot(self._stay()))

    async def _in_slot(self, visit: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(60):
                await visit
        finally:
            self._slots.release()

    def _body(self, **changes: Any) -> bytes:
        body = {
            "model": "glm-nano",
            "messages": [{"role": "user", "content": self._rng.choice(_PROMPTS)}],
            "ignore_eos": True,
            "max_tokens": 400,
            "stream": True,
            "temperature": self._rng.choice((0, 1.0)),
            **changes,
        }
        return json.dumps(body).encode()

    @staticmethod
    def _head(body: bytes) -> bytes:
        return (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()

    def _request(self, **changes: Any) -> bytes:
        body = self._body(**changes)
        return self._head(body) + body

    def _life_s(self) -> float:
        return self._rng.uniform(0, MAX_LIFE_S) * self._rng.choice((0.1, 1))

    async def _leave(self, sent: bytes) -> None:
        life_s, is_abrupt = self._life_s(), self._rng.random() < 0.5
        reader, writer = await asyncio.open_connection(*self._place)
        writer.write(sent)
        start = b""
        try:
            async with asyncio.timeout(life_s):
                while piece := await reader.read(1 << 16):
                    start = start or piece
        except TimeoutError:
            pass
        if is_abrupt:
            writer.transport.abort()
        else:
            writer.close()
        assert OK.startswith(start[: len(OK)]), start

    async def _abort(self, frontend: grpc.aio.Channel) -> None:
        """By the request's id, as an operator ends what runs too long."""
        life_s = self._life_s()
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            writer.write(self._request())
            start = await reader.readuntil(b'"id":"')
            name = (await reader.readuntil(b'"'))[:-1].decode()
            await asyncio.sleep(life_s)
            request = frontend_pb2.FrontendServiceAbortRequest(request_id=name)
            await frontend_pb2_grpc.FrontendServiceStub(frontend).Abort(request, timeout=10)
            rest = await reader.read()
        finally:
            writer.close()
        assert start.startswith(OK)
        assert b"[DONE]" in rest

    async def _cancel(self, scheduler: grpc.aio.Channel) -> None:
        """A client of the scheduler itself."""
        self._number += 1
        sequence = common_pb2.SequenceSpec(
            stream_id=1, prompt_token_ids=array("I", range(5, 5 + self._rng.randint(1, 300)))
            .tobytes()
        )  # fmt: skip
        sampling = common_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=600)
        submit = scheduler_pb2.TokenSubmit(
            request_id=f"edge-{self._number}", sequences=[sequence], sampling=sampling
        )
        life_s = self._life_s()
        stub = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        call = stub.Generate(
            scheduler_pb2.SchedulerServiceGenerateRequest(submit=submit), timeout=30
        )
        try:
            async with asyncio.timeout(life_s):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except TimeoutError:
            call.cancel()

    async def _stay(self) -> None:
        body = self._body(
            messages=[{"role": "user", "content": "Repeat: tree house"}],
            ignore_eos=False,
            max_tokens=40,
            temperature=0,
            stream=False,
        )
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            writer.write(self._head(body) + body)
            answer = await reader.read()
        finally:
            writer.close()
        self.texts.add(
            json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
        )
