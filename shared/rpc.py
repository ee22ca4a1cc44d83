"""Channels and servers: the only module that sets gRPC options, so both ends always agree.

Every key below is spelt as gRPC spells it; gRPC accepts any misspelt key without a word, hence the
allow-list in the tests. Unix sockets are the authentication inside a host: their directory is
private, they are created with mode 0600, and a second server on a live address does not start.
"""

import asyncio
import json
import os
import socket
import stat
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from shared.config import check_address
from shared.errors import ConfigError
from shared.log import get_logger
from shared.rpc_errors import ExceptionGuard, abort_with, error_from_rpc

__all__ = [
    "Server",
    "abort_with",
    "build_server",
    "build_sync_server",
    "error_from_rpc",
    "open_channel",
    "serve_until_stopped",
]

# For modules that hold a server but do not speak gRPC.
Server = grpc.aio.Server

KEEPALIVE_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
CONNECT_TIMEOUT_MS: Final = 2_000
# Past this many calls at once a server answers RESOURCE_EXHAUSTED; admission comes long before.
MAX_CONCURRENT_RPCS: Final = 4_096
# What serve_until_stopped waits beyond the grace before it gives a server up.
STOP_MARGIN_S: Final = 2.0

_logger = get_logger(__name__)

# Unary and idempotent: the only methods that gRPC may repeat by itself, UNAVAILABLE only.
IDEMPOTENT_METHODS: Final = (
    ("glm.v1.FrontendService", "Render"),
    ("glm.v1.FrontendService", "Abort"),
    ("glm.v1.DetokenizerService", "Abort"),
    ("glm.v1.SchedulerService", "Abort"),
    ("glm.v1.WorkerService", "GetCapacity"),
    ("glm.v1.AdminService", "GetStatus"),
    ("glm.v1.AdminService", "Drain"),
    ("glm.v1.AdminService", "SetLogLevel"),
)

Options = list[tuple[str, Any]]


def open_channel(
    target: str, *, max_receive_mib: int = 16, keepalive_ms: int = KEEPALIVE_MS
) -> grpc.aio.Channel:
    """A channel to `unix:/path` or `host:port`; connects by itself and again after a loss.

    Args:
        target: Address of the server.
        max_receive_mib: Largest answer taken.
        keepalive_ms: Pause between pings; both ends must use the same.
    """
    return grpc.aio.insecure_channel(
        check_address(target), options=channel_options(max_receive_mib, keepalive_ms)
    )


def build_server(
    *,
    address: str,
    max_receive_mib: int = 16,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    keepalive_ms: int = KEEPALIVE_MS,
) -> grpc.aio.Server:
    """A server bound to `address`, not started, its handlers behind the exception guard.

    Raises:
        ConfigError: Somebody listens there already, or the address cannot be bound.
    """
    server = grpc.aio.server(
        interceptors=(ExceptionGuard(), *interceptors),
        options=server_options(max_receive_mib, keepalive_ms),
        maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
    )
    _bind(server.add_insecure_port, address)
    return server


def build_sync_server(*, address: str) -> grpc.Server:
    """A small server with threads of its own, for answers that must not wait for the event loop."""
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="health"),
        options=server_options(1, KEEPALIVE_MS),
        maximum_concurrent_rpcs=64,
    )
    _bind(server.add_insecure_port, address)
    return server


async def serve_until_stopped(
    server: grpc.aio.Server, *, stop: asyncio.Event, grace_s: float
) -> None:
    """Start the server, wait for `stop`, then let running calls end for at most `grace_s`."""
    await server.start()
    try:
        await stop.wait()
    finally:
        # Not `wait_for` alone: the trap is a stop() that hangs, and it must not hang the process.
        stopping = asyncio.ensure_future(server.stop(grace_s))
        done, _ = await asyncio.wait({stopping}, timeout=grace_s + STOP_MARGIN_S)
        if not done:
            _logger.error("server did not stop in %.1f s, given up", grace_s + STOP_MARGIN_S)


def is_task_cancelled() -> bool:
    """Whether a `CancelledError` is meant for this task.

    A call on a channel that was closed, or that another task gave up, raises one too.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def channel_options(max_receive_mib: int, keepalive_ms: int) -> Options:
    """Options of every channel."""
    return [
        *_common_options(max_receive_mib, keepalive_ms),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # No pause: the time that a peer which took the connection has for its first words. A busy
        # one needs more than the pause between two tries.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.primary_user_agent", "glm-mesh"),
        ("grpc.service_config", _service_config()),
    ]


def server_options(max_receive_mib: int, keepalive_ms: int) -> Options:
    """Options of every server."""
    return [
        *_common_options(max_receive_mib, keepalive_ms),
        # Half the client's interval: pings of a quiet client are never counted as abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 2),
        ("grpc.so_reuseport", 0),
    ]


def _common_options(max_receive_mib: int, keepalive_ms: int) -> Options:
    timeout_ms = min(KEEPALIVE_TIMEOUT_MS, keepalive_ms)
    return [
        ("grpc.max_receive_message_length", max_receive_mib << 20),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # Without it a frozen peer is found only after 60 s, whatever the two lines above say.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _service_config() -> str:
    names = [{"service": service, "method": method} for service, method in IDEMPOTENT_METHODS]
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.05s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps(
        {
            "methodConfig": [{"name": names, "retryPolicy": policy}],
            "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
        }
    )


def _bind(add_port: Callable[[str], int], address: str) -> None:
    try:
        check_address(address)
    except ValueError as error:
        raise ConfigError(f"address {address!r}: {error}") from None
    is_unix = address.startswith("unix:")
    if is_unix:
        _prepare_socket_path(Path(address.removeprefix("unix:")))
    # The socket file is born with mode 0600: there is no moment at which others can connect.
    before = os.umask(0o177) if is_unix else None
    try:
        bound = add_port(address)
    except RuntimeError:
        bound = 0
    finally:
        if before is not None:
            os.umask(before)
    if not bound:
        raise ConfigError(f"address {address}: cannot listen there; is it in use?")


def _prepare_socket_path(path: Path) -> None:
    """Make the private directory and remove a socket file that nobody listens on."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.parent.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"directory {path.parent} is writable by others (mode {mode & 0o777:o}); "
                "sockets need a private one"
            )
        if not path.exists():
            return
        if not path.is_socket():
            raise ConfigError(f"{path} exists and is no socket")
        if _is_listening(path):
            raise ConfigError(f"address unix:{path} is in use by a running server")
        # gRPC would remove it too, but silently also when somebody listens.
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # a full backlog belongs to a server, be it a frozen one
            return True
    return True
