"""One HTTP connection: uvicorn's protocol with bounds, our envelope and ends that arrive.

What the protocol refuses itself has the one envelope too. An answer that ends the connection while
the client still sends is followed by a short time of listening: a socket that is closed with bytes
unread takes the answer back.

A wish to upgrade is none of ours to grant, so it is ignored, as RFC 9110 (7.8) has it. The parser
would read no body behind one: the head is given to a fresh parser without the wish.
"""

import asyncio
import fcntl
import http
import socket
import struct
import sys
import termios
import uuid
from typing import Final, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.frontend.errors import ApiError

# A request's line and headers: far above what clients send.
MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 30.0
# Of a client that goes on sending after its answer, so much time is read and thrown away.
LISTEN_S: Final = 2.0
# Name of the ASGI extension that leads to the connection of a request.
CONNECTION_EXTENSION: Final = "glm.connection"
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Connection:
    """A straight way from a response to its connection, past the layers of ASGI."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, cycle: RequestResponseCycle
    ) -> None:
        """Keep the parts of one request."""
        self._transport = transport
        self._flow = flow
        self._cycle = cycle

    def write(self, data: bytes) -> bool:
        """Send one chunk of a body whose head is out, now; False if it has to wait its turn."""
        if self._flow.write_paused or not self._cycle.chunked_encoding:
            return False
        if self._cycle.disconnected or self._cycle.response_complete:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def end_by_close(self) -> None:
        """Send an answer without length in no chunks; its end is that of the connection."""
        self._cycle.chunked_encoding = False
        self._cycle.keep_alive = False

    def expect(self, num_bytes: int) -> None:
        """How much of a body comes next: uvicorn counts what it passes on."""
        self._cycle.expected_content_length = num_bytes

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the client has not taken."""
        return num_unsent_bytes(self._transport)

    def drop(self) -> None:
        """Close at once: an orderly close would wait for the client to take what is buffered."""
        reset(self._transport)


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None under another server."""
    extension = (scope.get("extensions") or {}).get(CONNECTION_EXTENSION)
    return None if extension is None else extension["connection"]


def num_unsent_bytes(transport: asyncio.Transport) -> int:
    """What the client has not taken; 0 also when the system keeps it for us.

    The system takes bytes from us in large pieces, and only as it gets rid of them: its own share
    tells whether a slow client takes any.
    """
    size = transport.get_write_buffer_size()
    if not size:
        return 0
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
    return size + int.from_bytes(queued, sys.byteorder)


def reset(transport: asyncio.Transport) -> None:
    """Close at once, and let the system forget what the client has not taken either."""
    if transport.is_closing() and not transport.get_write_buffer_size():
        return  # it is closed as soon as the loop comes to it
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()


class _AnswerTransport:
    """What a cycle of uvicorn needs of a transport; closing goes by way of the protocol."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, protocol: "GatewayProtocol") -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.end


class GatewayProtocol(HttpToolsProtocol):
    """httptools' protocol with bounds on the head of a request."""

    # Not a constructor: uvicorn builds protocols itself.
    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _num_field_bytes = 0
    _is_ended = False

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the client has not taken."""
        return num_unsent_bytes(self.transport)

    @property
    def is_streaming(self) -> bool:
        """Whether an answer of no known length is under way: those have a keeper of their own."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            return False
        return bool(cycle.expected_content_length == 0)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has to say something, too."""
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head that does not end."""
        if self._is_ended:
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._head_timer is not None and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        """A head has begun."""
        super().on_message_begin()
        self._start_head()

    def on_url(self, url: bytes) -> None:
        """Part of the first line."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head; those behind a body are counted and left out."""
        self._count_field(len(name) + len(value) + 4)
        if self._head_timer is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The rest is the application's to bound; it gets a straight way to the connection."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("no tunnels here")  # to the parser, which stops
            return
        self._end_head()
        if self.parser.get_http_version() == "1.0":  # knows no interim answers
            self.expect_100_continue = False
        super().on_headers_complete()
        # It writes, asks whether it may, and closes: no more than that.
        self.cycle.transport = cast("asyncio.Transport", _AnswerTransport(self))
        # The application starts in a later turn of the loop, so this is in time.
        self.cycle.scope["extensions"] = {
            CONNECTION_EXTENSION: {"connection": Connection(self.transport, self.flow, self.cycle)}
        }

    def on_message_complete(self) -> None:
        """The body has ended; that of a head which is still to be read again has not begun."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The next request's turn, unless the connection ends."""
        if not self._is_ended:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, or a head that was too long for us to read on."""
        if self._num_field_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, msg)

    def end(self) -> None:
        """Close, after what was written; where the client still sends, listen for a while first."""
        if self.transport.is_closing() or self._is_ended:
            return
        if self.pipeline or (self.cycle is not None and self.cycle.more_body):
            self._listen_on()
        else:
            self.transport.close()

    def _listen_on(self) -> None:
        self._is_ended = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LISTEN_S, self.transport.close)

    def _parse(self, data: bytes) -> None:
        """Parse all of it; heads that wish for another protocol a second time, without the wish."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            else:
                return
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            # As uvicorn has it: what follows a request that ends the connection is thrown away.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _count_field(self, num_bytes: int) -> None:
        """A head may come in one piece, so its parts are counted as well."""
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")  # to the parser, which stops

    def _start_head(self) -> None:
        self._end_head()
        self._num_head_bytes = self._num_field_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_head_up)

    def _give_head_up(self) -> None:
        if self._num_head_bytes:
            self._refuse(408, "The head of the request did not arrive in time.")
        else:  # opened ahead of need, as browsers do
            self.transport.close()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        self._refuse(431, f"The head of a request has at most {MAX_HEAD_BYTES} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        self._end_head()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:  # an earlier request's answer
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = ApiError(status, message, code="invalid_http").body()
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
            f"x-request-id: {uuid.uuid4().hex}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._listen_on()
