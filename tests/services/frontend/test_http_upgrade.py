"""A wish for another protocol changes nothing: bodies arrive, and no body becomes a request."""

import asyncio
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from services.frontend.http_server import HttpServer, bind

WISHES = (
    (b"upgrade: h2c", b"connection: Upgrade, HTTP2-Settings", b"http2-settings: AAEAAEAAAAIA"),
    (b"Upgrade: websocket", b"Connection: upgrade", b"sec-websocket-version: 13"),
    (b"UPGRADE: TLS/1.2, foo/3", b"connection: upgrade"),
)
# What would be a request of its own, were it not a body.
SMUGGLED = b"DELETE /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


async def mirror(scope: Scope, receive: Receive, send: Send) -> None:
    """Tells what it was asked."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    names = sorted({name.decode() for name, _ in scope["headers"]} & {"upgrade", "x-mark"})
    document = [scope["method"], scope["path"], names, body.decode()]
    answer = json.dumps(document).encode() + b"\n"
    head = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": answer})


async def exchange_pieces(port: int, pieces: list[bytes]) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(30):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)  # a segment of its own
        answer = await reader.read()
    writer.close()
    return answer


def told(answer: bytes) -> list[object]:
    """What the requests of a connection were, to the application."""
    return [json.loads(line) for line in answer.splitlines() if line.startswith(b"[")]


def request(framing: bytes, *fields: bytes) -> bytes:
    lines = (b"POST /first HTTP/1.1", b"host: x", *fields, b"x-mark: 1")
    length = b"content-length: %d" % len(SMUGGLED)
    if framing == b"length":
        return b"\r\n".join((*lines, length, b"", SMUGGLED))
    if framing == b"chunked":
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
        return b"\r\n".join((*lines, b"transfer-encoding: chunked", b"", chunks))
    return b"\r\n".join((*lines, b"", b""))


LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def expected(framing: bytes) -> list[object]:
    body = "" if framing == b"none" else SMUGGLED.decode()
    return [["POST", "/first", ["x-mark"], body], ["GET", "/last", [], ""]]


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("framing", [b"length", b"chunked", b"none"])
async def test_a_body_behind_a_wish_to_upgrade_arrives(
    framing: bytes, wish: tuple[bytes, ...]
) -> None:
    server = HttpServer(mirror, bind("127.0.0.1", 0))
    await server.start()
    first = request(framing, *wish)
    head, _, body = first.partition(b"\r\n\r\n")
    splits = ([first + LAST], [first, LAST], [head + b"\r\n\r\n", body, LAST])
    for pieces in splits:
        assert told(await exchange_pieces(server.port, pieces)) == expected(framing)
    await server.stop()


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 400), max_size=6),
    framings=st.lists(st.sampled_from([b"length", b"chunked", b"none"]), min_size=1, max_size=3),
    wish=st.sampled_from(WISHES),
)
def test_no_cut_of_the_bytes_changes_what_was_asked(
    cuts: list[int], framings: list[bytes], wish: tuple[bytes, ...]
) -> None:
    data = b"".join(request(framing, *wish) for framing in framings) + LAST
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]

    async def run() -> bytes:
        server = HttpServer(mirror, bind("127.0.0.1", 0))
        await server.start()
        answer = await exchange_pieces(server.port, pieces)
        await server.stop()
        return answer

    firsts = [expected(framing)[0] for framing in framings]
    assert told(asyncio.run(run())) == [*firsts, expected(b"none")[1]]


async def test_an_old_client_and_one_that_ends_the_connection_may_wish_too() -> None:
    server = HttpServer(mirror, bind("127.0.0.1", 0))
    await server.start()
    close = request(b"length", b"upgrade: h2c", b"connection: upgrade, close")
    old = request(b"length", b"upgrade: h2c", b"connection: upgrade").replace(b"/1.1", b"/1.0", 1)
    for data in (close, old):
        answer = await exchange_pieces(server.port, [data])
        assert told(answer) == expected(b"length")[:1]
        assert b"\r\nconnection: close\r\n" in answer
    await server.stop()


async def test_a_client_that_waits_for_a_word_before_its_body_gets_it() -> None:
    server = HttpServer(mirror, bind("127.0.0.1", 0))
    await server.start()
    wish = (b"upgrade: h2c", b"connection: upgrade", b"expect: 100-continue")
    answer = await exchange_pieces(server.port, [request(b"length", *wish), LAST])
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    assert told(answer) == expected(b"length")
    await server.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n" + SMUGGLED,
        b"CONNECT / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n" + SMUGGLED,
        request(b"length", *WISHES[0], b"transfer-encoding: chunked"),
        request(b"length", *WISHES[0], b"transfer-encoding: gzip"),
        request(b"length", *WISHES[0], b"content-length: 3"),
        request(b"none", *WISHES[0], b"transfer-encoding: gzip"),
    ],
    ids=["tunnel", "wishing tunnel", "two framings", "no framing", "two lengths", "no end"],
)
async def test_what_has_no_clear_end_is_refused_with_a_wish_too(data: bytes) -> None:
    server = HttpServer(mirror, bind("127.0.0.1", 0))
    await server.start()
    answer = await exchange_pieces(server.port, [data])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"code": "invalid_http"' in answer
    await server.stop()


async def test_a_head_with_a_wish_has_its_bound() -> None:
    server = HttpServer(mirror, bind("127.0.0.1", 0))
    await server.start()
    for size, status in ((60_000, b"200"), (70_000, b"431")):
        head = request(b"none", *WISHES[0], b"x-long: " + b"a" * size)
        answer = await exchange_pieces(server.port, [head + LAST])
        assert answer.startswith(b"HTTP/1.1 " + status)
    await server.stop()
