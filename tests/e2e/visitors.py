"""HTTP over bare sockets, for clients that leave, stall or send what no library sends."""

import asyncio
import json
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

LAST_CHUNK: Final = b"0\r\n\r\n"
SMALL_BUFFER: Final = 4096
POLL_S: Final = 0.1
_TURN: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a server sent until it closed the connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def value(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The data of each event, comments left out."""
        return [
            line.removeprefix("data: ")
            for line in self.body.decode().split("\n")
            if line.startswith("data: ")
        ]


class Place:
    """Where a server listens."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = (str(parts.hostname), int(parts.port or 0))

    async def ask(self, data: bytes) -> Answer:
        """Send, and read until the server closes."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(data)
            return parse(await reader.read())
        finally:
            writer.close()

    async def leave(
        self, data: bytes, *, behind: bytes | int, after_s: float, is_abrupt: bool
    ) -> bytes:
        """Send, and hang up some time after `behind` was read: these bytes, or so many."""
        reader, writer = await asyncio.open_connection(*self.address)
        start = b""
        try:
            writer.write(data)
            while not (behind in start if isinstance(behind, bytes) else len(start) >= behind):
                piece = await reader.read(_TURN)
                if not piece:
                    break
                start += piece
            await asyncio.sleep(after_s)
        finally:
            if is_abrupt:
                reset_on_close(writer.get_extra_info("socket"))
                writer.transport.abort()
            else:
                writer.close()
        return start

    async def stall(self, data: bytes, *, num_read: int, limit_s: float) -> float:
        """Send, read a little, then nothing any more; seconds until the server cut the connection.

        The socket stays open until then, or for `limit_s`.
        """
        loop = asyncio.get_running_loop()
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            lazy.setblocking(False)
            await loop.sock_connect(lazy, self.address)
            await loop.sock_sendall(lazy, data)
            while num_read > 0 and (piece := await loop.sock_recv(lazy, num_read)):
                num_read -= len(piece)
            started = time.monotonic()
            watch = select.poll()
            watch.register(lazy, 0)  # hang-ups and errors are told unasked
            while not watch.poll(0):
                if time.monotonic() - started > limit_s:
                    return float("inf")
                await asyncio.sleep(POLL_S)
            return time.monotonic() - started


def request(path: str, body: bytes | dict[str, Any], **headers: str) -> bytes:
    """A POST of JSON whose answer ends with the connection."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "x",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def parse(data: bytes) -> Answer:
    """Head and body; AssertionError if the answer is not whole."""
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    headers = {name.lower(): value for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        rest = _join_chunks(rest)
    else:
        assert len(rest) == int(headers["content-length"]), "the answer is not whole"
    return Answer(int(first.split()[1]), headers, rest)


def reset_on_close(sock: socket.socket) -> None:
    """Closing sends a reset, as the death of a client's machine or a proxy's limit does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _join_chunks(rest: bytes) -> bytes:
    assert rest.endswith(LAST_CHUNK), f"the answer is not whole: {rest[-200:]!r}"
    pieces, at = [], 0
    while True:
        end = rest.index(b"\r\n", at)
        size = int(rest[at:end], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(rest[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
