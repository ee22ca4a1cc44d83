"""The HTTP server: uvicorn with our signals, our envelope and a hard way to close a socket."""

import asyncio
import contextlib
import http
import resource
import socket
import uuid
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.frontend.errors import ApiError
from shared.errors import ConfigError

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75
# For open connections to be closed once no request runs any more.
CLOSE_GRACE_S: Final = 3
STARTUP_POLL_S: Final = 0.01
# A request's line and headers: far above what clients send.
MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 30.0
# Name of the ASGI extension that leads to the connection of a request.
CONNECTION_EXTENSION: Final = "glm.connection"


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

    def drop(self) -> None:
        """Close at once: an orderly close would wait for the client to take what is buffered."""
        self._transport.abort()


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None under another server."""
    extension = (scope.get("extensions") or {}).get(CONNECTION_EXTENSION)
    return None if extension is None else extension["connection"]


class GatewayProtocol(HttpToolsProtocol):
    """httptools' protocol with bounds on the head of a request.

    What it refuses itself has the one envelope too.
    """

    # Not a constructor: uvicorn builds protocols itself.
    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

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
        super().data_received(data)
        if self._head_timer is not None and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The head of a request has at most {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head has begun."""
        super().on_message_begin()
        self._start_head()

    def on_headers_complete(self) -> None:
        """The rest is the application's to bound; it gets a straight way to the connection."""
        self._end_head()
        super().on_headers_complete()
        # The application starts in a later turn of the loop, so this is in time.
        self.cycle.scope["extensions"] = {
            CONNECTION_EXTENSION: {"connection": Connection(self.transport, self.flow, self.cycle)}
        }

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        self._refuse(400, msg)

    def _start_head(self) -> None:
        self._end_head()
        self._num_head_bytes = 0
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

    def _refuse(self, status: int, message: str) -> None:
        self._end_head()
        body = ApiError(status, message, code="invalid_http").body()
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
            f"x-request-id: {uuid.uuid4().hex}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process: draining comes before closing."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on a bound socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        """Prepare; `start` begins to accept."""
        config = uvicorn.Config(
            app,
            http=GatewayProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            # Every fault is logged by the door already, with the request's id.
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_GRACE_S,
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._listener.getsockname()[1])

    async def start(self) -> None:
        """Accept connections from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(STARTUP_POLL_S)

    async def stop(self) -> None:
        """Close the listener and all connections; requests in work are cut."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
        self._listener.close()


def raise_file_limit() -> None:
    """Allow as many open sockets as the system grants; usual soft limits are low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening socket; `ConfigError` names what cannot be bound.

    Sockets of one user that are all `is_shared` listen on one port: each connection goes to one of
    them, chosen by the kernel.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, address = found[0][0], found[0][4]
        return _listen(family, address, is_shared=is_shared)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}") from None


def _listen(
    family: socket.AddressFamily,
    address: Any,  # noqa: ANN401  # per family
    *,
    is_shared: bool,
) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
