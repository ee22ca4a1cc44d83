"""Sockets and bytes below the application."""

import asyncio
import resource
import socket
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from services.frontend.http_server import HttpServer, bind, connection_of, raise_file_limit
from shared.errors import ConfigError


async def exchange_bytes(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


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


@pytest.mark.parametrize(("data", "answer"), [(b"", b""), (b"GET / HT", b"HTTP/1.1 408 ")])
async def test_a_head_that_does_not_come_is_not_waited_for(
    data: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.frontend.http_server.HEAD_TIMEOUT_S", 0.05)
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    assert (await exchange_bytes(server.port, data))[:13] == answer
    await server.stop()


async def test_bodies_and_idle_connections_are_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.http_server.HEAD_TIMEOUT_S", 0.05)
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
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
    answer = await exchange_bytes(server.port, b"GET / HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert not answer.endswith(b"0\r\n\r\n")
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


def test_the_process_may_open_as_many_sockets_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_port_in_use_is_a_config_error_that_names_it() -> None:
    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--port {port}"):
        bind("127.0.0.1", port)
    taken.close()


def test_a_host_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="256\\.1\\.1\\.1"):
        bind("256.1.1.1", 0)


async def test_stopping_closes_idle_connections_and_the_listener() -> None:
    server = HttpServer(hello, bind("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    port = server.port
    await server.stop()
    assert await reader.read() == b""
    writer.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_stopping_a_server_that_never_started_is_fine() -> None:
    await HttpServer(hello, bind("127.0.0.1", 0)).stop()


async def test_a_stuck_handler_does_not_keep_the_server_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("services.frontend.http_server.CLOSE_GRACE_S", 0)
    server = HttpServer(stuck, bind("127.0.0.1", 0))
    await server.start()
    asking = asyncio.create_task(exchange_bytes(server.port, b"GET / HTTP/1.1\r\n\r\n"))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await server.stop()
    results: list[Any] = await asyncio.gather(asking, return_exceptions=True)
    assert len(results) == 1


def test_a_port_is_shared_only_by_those_who_want_to() -> None:
    first = bind("127.0.0.1", 0, is_shared=True)
    port = first.getsockname()[1]
    second = bind("127.0.0.1", port, is_shared=True)
    with pytest.raises(ConfigError, match="Address already in use"):
        bind("127.0.0.1", port)
    first.close()
    second.close()
