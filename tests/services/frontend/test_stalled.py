"""Clients that leave the end of their answer lying."""

import asyncio
import select
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from services.frontend.http_server import MAX_UNSENT_BYTES, HttpServer, bind
from services.frontend.stalled import StallWatch

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LARGE = 1 << 20


class Fakes:
    """A connection as the watch sees it."""

    def __init__(self, num_unsent_bytes: int, *, is_streaming: bool = False) -> None:
        self.num_unsent_bytes = num_unsent_bytes
        self.is_streaming = is_streaming
        self.is_cut = False
        self.transport = self

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> "Fakes":
        return self

    def setsockopt(self, *option: object) -> None:
        pass

    def abort(self) -> None:
        self.is_cut = True


def test_only_who_takes_no_bytes_for_the_whole_time_is_cut() -> None:
    stalled, slow, done = Fakes(500), Fakes(500), Fakes(0)
    streaming = Fakes(500, is_streaming=True)
    watch = StallWatch(30)
    for now in range(31):
        slow.num_unsent_bytes -= 1
        watch.look([stalled, slow, done, streaming], now)  # type: ignore[list-item]
        assert stalled.is_cut == (now >= 30)
    assert not slow.is_cut
    assert not done.is_cut
    assert not streaming.is_cut


def test_the_time_begins_anew_with_every_answer() -> None:
    client = Fakes(500)
    watch = StallWatch(30)
    watch.look([client], 0)  # type: ignore[list-item]
    client.num_unsent_bytes = 0
    watch.look([client], 20)  # type: ignore[list-item]
    client.num_unsent_bytes = 500
    watch.look([client], 29)  # type: ignore[list-item]
    watch.look([client], 58)  # type: ignore[list-item]
    assert not client.is_cut
    watch.look([client], 59)  # type: ignore[list-item]
    assert client.is_cut


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"%d" % LARGE)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * LARGE})


@pytest.fixture
def stall_s() -> float:
    """How patient the server is."""
    return 0.2


@pytest.fixture
async def server(stall_s: float) -> AsyncIterator[HttpServer]:
    """Which gives large answers."""
    server = HttpServer(large, bind("127.0.0.1", 0), stall_s=stall_s)
    await server.start()
    yield server
    await server.stop()


async def open_lazy(server: HttpServer, data: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.setblocking(False)
    await loop.sock_connect(lazy, ("127.0.0.1", server.port))
    await loop.sock_sendall(lazy, data)
    return lazy


@pytest.mark.parametrize("data", [REQUEST, CLOSING, REQUEST * 3], ids=["kept", "closed", "behind"])
async def test_a_client_that_never_reads_a_whole_answer_is_cut(
    server: HttpServer, data: bytes
) -> None:
    with await open_lazy(server, data) as lazy:
        watch = select.poll()
        watch.register(lazy, 0)
        async with asyncio.timeout(20):
            while not watch.poll(0):  # noqa: ASYNC110  # a hang-up has no event in asyncio
                await asyncio.sleep(0.01)
        assert watch.poll(0)[0][1] & select.POLLHUP


# A process that stands still for a while makes its client stall.
@pytest.mark.parametrize("stall_s", [3.0])
async def test_a_slow_client_gets_all_of_it(server: HttpServer, stall_s: float) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    with await open_lazy(server, CLOSING) as slow:
        num_read = 0
        async with asyncio.timeout(60):
            while piece := await loop.sock_recv(slow, 1 << 12):
                num_read += len(piece)
                await asyncio.sleep(0.02)
    assert num_read > LARGE
    assert loop.time() - started > stall_s, "longer in all than anybody may stall"


async def test_the_system_keeps_little_for_who_does_not_read(server: HttpServer) -> None:
    """Megabytes, if it is let; and a stalled client would be noticed only after those."""
    held: list[int] = []

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            held.append(1 << 15)
            await send({"type": "http.response.body", "body": b"x" * (1 << 15), "more_body": True})

    flooding = HttpServer(flood, bind("127.0.0.1", 0))
    await flooding.start()
    with await open_lazy(flooding, REQUEST):
        num_held = -1
        while num_held != len(held):
            num_held = len(held)
            await asyncio.sleep(0.2)
        # Beside what the gateway buffers itself: 64 KiB and a piece.
        assert sum(held) < MAX_UNSENT_BYTES + (256 << 10)
    await flooding.stop()
