"""The listener, the process's bounds, and stopping."""

import asyncio
import resource
import socket
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from services.frontend.http_server import HttpServer, bind, raise_file_limit
from shared.errors import ConfigError
from tests.services.frontend.raw_http import exchange_bytes, hello


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
    is_asked = asyncio.Event()

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        is_asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("services.frontend.http_server.CLOSE_GRACE_S", 0)
    server = HttpServer(stuck, bind("127.0.0.1", 0))
    await server.start()
    asking = asyncio.create_task(exchange_bytes(server.port, b"GET / HTTP/1.1\r\n\r\n"))
    async with asyncio.timeout(30):
        await is_asked.wait()
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
