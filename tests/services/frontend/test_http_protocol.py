"""Bounds of a connection, ends that arrive, and the straight way to it."""

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from services.frontend.http_protocol import connection_of
from services.frontend.http_server import HttpServer, bind
from tests.services.frontend.raw_http import exchange_bytes, hello
from tests.services.frontend.waits import until

PROTOCOL = "services.frontend.http_protocol"


@pytest.mark.parametrize("data", [b"GARBAGE\r\n\r\n", b"\x00\x01\x02\r\n\r\n", b"\x16\x03\x01\x02"])
async def test_bytes_that_are_no_http_get_the_envelope(data: bytes) -> None:
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    answer = await exchange_bytes(server.port, data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code": "invalid_http"' in answer
    assert b"\r\nx-request-id: " in answer
    ok = await exchange_bytes(server.port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert b"hello" in ok
    await server.stop()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx-long: " + b"a" * 70_000,
        b"GET /" + b"a" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 10_000,
    ],
)
async def test_a_head_that_does_not_end_is_refused(head: bytes) -> None:
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    answer = await exchange_bytes(server.port, head)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code": "invalid_http"' in answer
    await server.stop()


async def test_a_connection_that_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{PROTOCOL}.HEAD_TIMEOUT_S", 0.05)
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    assert await exchange_bytes(server.port, b"") == b""
    await server.stop()


async def open_before_the_limit(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose heads have little time, each from its first byte on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await until(lambda: server.connections)
    monkeypatch.setattr(f"{PROTOCOL}.HEAD_TIMEOUT_S", 0.05)
    return reader, writer


async def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    reader, writer = await open_before_the_limit(server, monkeypatch)
    writer.write(b"GET / HT")
    async with asyncio.timeout(30):
        assert (await reader.read())[:13] == b"HTTP/1.1 408 "
    writer.close()
    await server.stop()


async def test_bodies_and_idle_connections_are_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    reader, writer = await open_before_the_limit(server, monkeypatch)
    for _ in range(2):
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000)
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.1)
    writer.close()
    await server.stop()


async def test_a_connection_can_be_dropped_at_once() -> None:
    async def drop(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        connection = connection_of(scope)
        assert connection is not None
        connection.drop()

    server = HttpServer(drop, bind("127.0.0.1", 0))
    await server.start()
    with pytest.raises(ConnectionResetError):
        await exchange_bytes(server.port, b"GET / HTTP/1.1\r\n\r\n")
    await server.stop()


async def test_chunks_written_straight_to_the_connection_are_part_of_the_answer() -> None:
    async def straight(scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        assert connection is not None
        assert not connection.write(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert connection.write(b"one")
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        assert connection.write(b"x" * 17)
        await send({"type": "http.response.body", "body": b""})
        assert not connection.write(b"too late")

    server = HttpServer(straight, bind("127.0.0.1", 0))
    await server.start()
    answer = await exchange_bytes(server.port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
    body = answer.partition(b"\r\n\r\n")[2]
    assert body == b"3\r\none\r\n3\r\ntwo\r\n11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n"
    await server.stop()


async def test_a_client_that_does_not_read_makes_writes_wait() -> None:
    outcome: list[bool] = []

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        assert connection is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            outcome.append(connection.write(b"x" * 65_536))
            if not outcome[-1]:
                break
            await asyncio.sleep(0)
        connection.drop()

    server = HttpServer(flood, bind("127.0.0.1", 0))
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(10):
        while not outcome or outcome[-1]:  # noqa: ASYNC110  # told by no event
            await asyncio.sleep(0.01)
    assert len(outcome) < 1000
    writer.close()
    await server.stop()


def test_another_server_offers_no_straight_way() -> None:
    assert connection_of({"type": "http"}) is None


def post(size: int, *fields: bytes) -> bytes:
    lines = (b"POST / HTTP/1.1", b"host: x", b"content-length: %d" % size, *fields)
    return b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@pytest.mark.parametrize("num_pieces", [1, 7])
@pytest.mark.parametrize(
    "head",
    [
        post(0, b"x-long: " + b"a" * 70_000),
        post(0, *[b"x-%d: b" % n for n in range(9_000)]),
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["long", "many", "url"],
)
async def test_a_head_over_the_bound_is_refused_however_it_arrives(
    head: bytes, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, also: then it has ended before anybody counts what came."""
    monkeypatch.setattr(f"{PROTOCOL}.LISTEN_S", 30)
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    size = len(head) // num_pieces + 1
    for start in range(0, len(head), size):
        writer.write(head[start : start + size])
        await asyncio.sleep(0.005)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 431 ")
    await server.stop()


async def test_fields_behind_a_body_are_no_fields_of_the_request() -> None:
    """RFC 9110 (6.5.1) lets nobody take them for such: a proxy has not looked at them."""
    seen: list[list[bytes]] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        seen.append([name for name, _ in scope["headers"]])
        await hello(scope, receive, send)

    server = HttpServer(look, bind("127.0.0.1", 0))
    await server.start()
    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    trailer = b"0\r\nauthorization: Bearer k\r\nx-request-id: a\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nhost: x\r\nx-mark: 1\r\nconnection: close\r\n\r\n"
    assert (await exchange_bytes(server.port, chunked + trailer + last)).count(b"hello") == 2
    assert seen == [[b"host", b"transfer-encoding"], [b"host", b"x-mark", b"connection"]]
    await server.stop()


async def refuse_early(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body, and ends the connection."""
    await send(
        {
            "type": "http.response.start",
            "status": 413,
            "headers": [(b"connection", b"close"), (b"content-length", b"3")],
        }
    )
    await send({"type": "http.response.body", "body": b"no!"})


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nx-long: " + b"a" * 4_000_000, b"431"),
        (b"\x00" * 4_000_000, b"400"),
        (post(4_000_000) + b"x" * 4_000_000, b"413"),
    ],
    ids=["head", "no HTTP", "body"],
)
async def test_an_answer_arrives_though_its_client_still_sends(
    data: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that is closed with bytes unread resets the connection, answer and all."""
    monkeypatch.setattr(f"{PROTOCOL}.LISTEN_S", 30)
    server = HttpServer(refuse_early, bind("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    async with asyncio.timeout(30):
        await writer.drain()
        await asyncio.sleep(0.05)  # what is left unread has to wait at the server
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 " + status)
    await server.stop()


async def test_who_sends_on_after_the_answer_is_listened_to_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.frontend.http_protocol.LISTEN_S", 0.05)
    server = HttpServer(refuse_early, bind("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(1 << 30))
    assert (await reader.read(12)) == b"HTTP/1.1 413"
    with pytest.raises(ConnectionError):  # noqa: PT012  # some write meets the closed socket
        async with asyncio.timeout(10):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.01)
    writer.close()
    await server.stop()


async def test_bytes_that_are_no_http_behind_a_request_end_it_with_one_answer() -> None:
    ended: list[str] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            pass
        ended.append(message["type"])
        await hello(scope, receive, send)

    server = HttpServer(slow, bind("127.0.0.1", 0))
    await server.start()
    answer = await exchange_bytes(server.port, post(0) + b"GARBAGE\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert ended == ["http.disconnect"]
    await server.stop()


def is_reset(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


async def test_a_dropped_client_is_told_at_once_though_it_reads_nothing() -> None:
    dropped = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        connection = connection_of(scope)
        assert connection is not None
        while connection.write(b"x" * 65_536):  # noqa: ASYNC110  # the socket is the event
            await asyncio.sleep(0)
        connection.drop()
        dropped.set()

    server = HttpServer(flood, bind("127.0.0.1", 0))
    await server.start()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(lazy, ("127.0.0.1", server.port))
        await loop.sock_sendall(lazy, b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(10):
            await dropped.wait()
            while not is_reset(lazy):  # noqa: ASYNC110  # told by no event
                await asyncio.sleep(0.01)
    await server.stop()
