"""The HTTP server: uvicorn with our signals and our protocol, and an eye on stalled clients."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp

from services.frontend.close_delimited import CloseDelimited
from services.frontend.http_protocol import GatewayProtocol
from services.frontend.stalled import StallWatch
from shared.errors import ConfigError

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75
# For open connections to be closed once no request runs any more.
CLOSE_GRACE_S: Final = 3
STARTUP_POLL_S: Final = 0.01
# Bytes that the system keeps for a client beyond what is on its way. Left alone it keeps megabytes
# for each, in which a client that reads nothing would not be noticed.
MAX_UNSENT_BYTES: Final = 128 << 10


class _Server(uvicorn.Server):
    """Leaves signals to the process: draining comes before closing."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on a bound socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, stall_s: float = 30.0) -> None:
        """Prepare; `start` begins to accept.

        Args:
            app: What answers.
            listener: Bound.
            stall_s: A client that takes no bytes for so long is cut off.
        """
        config = uvicorn.Config(
            CloseDelimited(app),
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
        self._port = int(listener.getsockname()[1])
        self._stall_watch = StallWatch(stall_s)
        self._task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that was bound."""
        return self._port

    @property
    def connections(self) -> set[GatewayProtocol]:
        """The open ones, whoever they are then."""
        # All of them are of the one class that the server was told to make.
        return cast("set[GatewayProtocol]", self._server.server_state.connections)

    async def start(self) -> None:
        """Accept connections from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(STARTUP_POLL_S)
        self._watch_task = asyncio.create_task(self._stall_watch.run(self.connections))

    def stop_listening(self) -> None:
        """Leave new connections to others that listen on the port; those that came are ours.

        Idempotent. The listener is closed right after the loop has accepted what waits there: what
        is not accepted by then, the system would reset.
        """
        asyncio.get_running_loop().call_later(0, self._close_listeners)

    def close_idle(self) -> None:
        """Close connections without a request; others close after their answer."""
        for connection in list(self.connections):
            connection.shutdown()

    def _close_listeners(self) -> None:
        for server in self._server.servers:
            server.close()

    async def stop(self) -> None:
        """Close the listener and all connections; requests in work are cut."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
        if self._watch_task is not None:
            self._watch_task.cancel()
            self._watch_task = None
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
        # Connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
