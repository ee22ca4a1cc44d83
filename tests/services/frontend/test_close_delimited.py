"""Clients of HTTP/1.0 get no chunks: a length, or an end by closing."""

import asyncio
import http.client

import pytest
from starlette.types import Receive, Scope, Send

from services.frontend.close_delimited import CloseDelimited
from services.frontend.http_protocol import connection_of
from services.frontend.http_server import HttpServer, bind
from tests.services.frontend.raw_http import exchange_bytes

PIECES = (b"data: 1\n\n", b"", b"data: " + b"x" * 100_000 + b"\n\n", b"data: [DONE]\n\n")
GET = b"GET / HTTP/%b\r\nhost: x\r\nconnection: keep-alive\r\n\r\n"


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in PIECES:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def whole(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"Content-Length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


async def exchange_parts(server: HttpServer, data: bytes) -> tuple[bytes, bytes]:
    answer = await exchange_bytes(server.port, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


async def test_a_stream_to_an_old_client_has_no_chunks_and_ends_with_the_connection() -> None:
    server = HttpServer(stream, bind("127.0.0.1", 0))
    await server.start()
    head, body = await exchange_parts(server, GET % b"1.0")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    assert body == b"".join(PIECES)
    await server.stop()


async def test_a_stream_to_a_client_of_today_has_chunks() -> None:
    server = HttpServer(stream, bind("127.0.0.1", 0))
    await server.start()
    head, body = await exchange_parts(server, GET.replace(b"keep-alive", b"close") % b"1.1")
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"0\r\n\r\n")
    await server.stop()


async def test_a_whole_answer_keeps_its_length() -> None:
    server = HttpServer(whole, bind("127.0.0.1", 0))
    await server.start()
    head, body = await exchange_parts(server, GET % b"1.0")
    assert b"content-length: 5" in head
    assert b"transfer-encoding" not in head
    assert body == b"hello"
    await server.stop()


async def test_answers_without_a_body_have_none() -> None:
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    for app, method in ((nothing, b"GET"), (stream, b"HEAD")):
        server = HttpServer(app, bind("127.0.0.1", 0))
        await server.start()
        head, body = await exchange_parts(server, (GET % b"1.0").replace(b"GET", method))
        assert head.startswith(b"http/1.1 20")
        assert b"transfer-encoding" not in head
        assert body == b""
        await server.stop()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_stream_that_breaks_off_does_not_look_whole(fails: bool) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if fails:
            raise RuntimeError("planted")

    server = HttpServer(broken, bind("127.0.0.1", 0))
    await server.start()
    with pytest.raises(ConnectionResetError):
        await exchange_parts(server, GET % b"1.0")
    await server.stop()


async def test_frames_for_an_old_client_go_the_long_way() -> None:
    outcome: list[bool] = []

    async def straight(scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        assert connection is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        outcome.append(connection.write(b"chunk"))
        await send({"type": "http.response.body", "body": b"frame"})

    server = HttpServer(straight, bind("127.0.0.1", 0))
    await server.start()
    _, body = await exchange_parts(server, GET % b"1.0")
    assert (outcome, body) == ([False], b"frame")
    await server.stop()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream_under_way_is_told_from_the_rest_of_an_answer(version: bytes) -> None:
    """One that is silent for long is not stalled."""
    looks: list[bool] = []

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        def look() -> None:
            looks.extend(connection.is_streaming for connection in server.connections)

        look()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        look()
        await send({"type": "http.response.body", "body": b"frame", "more_body": True})
        look()
        await send({"type": "http.response.body", "body": b""})
        look()

    server = HttpServer(watched, bind("127.0.0.1", 0))
    await server.start()
    await exchange_parts(server, (GET % version).replace(b"keep-alive", b"close"))
    assert looks == [False, True, True, False]
    await server.stop()


async def test_an_old_client_gets_no_interim_answer() -> None:
    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"abc"
        await whole(scope, receive, send)

    server = HttpServer(read, bind("127.0.0.1", 0))
    await server.start()
    post = b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc"
    head, _ = await exchange_parts(server, post)
    assert head.startswith(b"http/1.1 200 ")
    await server.stop()


async def test_a_library_of_old_reads_a_stream_to_its_end() -> None:
    server = HttpServer(stream, bind("127.0.0.1", 0))
    await server.start()

    def read() -> bytes:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        client._http_vsn, client._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
        client.request("GET", "/")
        return client.getresponse().read()

    assert await asyncio.to_thread(read) == b"".join(PIECES)
    await server.stop()


async def test_another_server_is_left_alone() -> None:
    sent: list[str] = []

    async def send(message: object) -> None:
        sent.append(str(message))

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    await CloseDelimited(stream)({"type": "http", "http_version": "1.0"}, receive, send)
    assert len(sent) == len(PIECES) + 2
