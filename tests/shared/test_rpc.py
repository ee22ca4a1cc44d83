import asyncio
import json
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from shared import rpc
from shared.errors import ConfigError, FailureReason, RequestError

# Spelt as in gRPC's channel_arg_names.h; gRPC ignores any other key without a word.
KNOWN_KEYS = {
    "grpc.max_receive_message_length",
    "grpc.max_send_message_length",
    "grpc.keepalive_time_ms",
    "grpc.keepalive_timeout_ms",
    "grpc.keepalive_permit_without_calls",
    "grpc.http2.ping_timeout_ms",
    "grpc.http2.min_ping_interval_without_data_ms",
    "grpc.so_reuseport",
    "grpc.initial_reconnect_backoff_ms",
    "grpc.min_reconnect_backoff_ms",
    "grpc.max_reconnect_backoff_ms",
    "grpc.primary_user_agent",
    "grpc.service_config",
}


def test_every_option_is_on_the_allow_list() -> None:
    options = rpc.channel_options(16, 20_000) + rpc.server_options(16, 20_000)
    assert {key for key, _ in options} <= KNOWN_KEYS


def test_both_ends_agree_on_pings() -> None:
    client, server = dict(rpc.channel_options(16, 20_000)), dict(rpc.server_options(16, 20_000))
    assert client["grpc.keepalive_time_ms"] == 20_000
    assert client["grpc.http2.ping_timeout_ms"] == client["grpc.keepalive_timeout_ms"] == 5_000
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert server["grpc.so_reuseport"] == 0


def test_only_unary_idempotent_methods_are_repeated() -> None:
    config = json.loads(dict(rpc.channel_options(16, 20_000))["grpc.service_config"])
    methods = {name["method"] for entry in config["methodConfig"] for name in entry["name"]}
    assert not methods & {"Connect", "Generate", "RunSteps", "WatchLoad"}
    for entry in config["methodConfig"]:
        assert entry["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]


async def quiet(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """Speaks once, is silent for more than three keepalive intervals, speaks again."""
    yield b"first"
    await asyncio.sleep(1.2)
    yield b"second"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_quiet_stream_outlives_three_keepalive_intervals(tmp_path: Path, kind: str) -> None:
    address = f"unix:{tmp_path}/s" if kind == "unix" else f"127.0.0.1:{free_port()}"
    server = rpc.build_server(address=address, keepalive_ms=300)
    handler = grpc.unary_stream_rpc_method_handler(quiet)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Quiet": handler}),)
    )
    await server.start()
    async with rpc.open_channel(address, keepalive_ms=300) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stream = channel.unary_stream("/test.Service/Quiet")(b"", timeout=30)
        assert [await stream.read(), await stream.read()] == [b"first", b"second"]
    await server.stop(0)


async def test_socket_is_private_and_its_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "run" / "x.sock"
    before = os.umask(0o022)
    server = rpc.build_server(address=f"unix:{path}")
    await server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.umask(before) == 0o022
    await server.stop(0)


async def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "open"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by others"):
        rpc.build_server(address=f"unix:{shared}/x.sock")


async def test_a_second_server_on_a_live_socket_does_not_start(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    server = rpc.build_server(address=address)
    await server.start()
    with pytest.raises(ConfigError, match="in use"):
        rpc.build_server(address=address)
    async with rpc.open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
    await server.stop(0)


async def test_a_second_server_on_a_live_port_does_not_start() -> None:
    address = f"127.0.0.1:{free_port()}"
    server = rpc.build_server(address=address)
    with pytest.raises(ConfigError, match="in use"):
        rpc.build_server(address=address)
    await server.stop(0)


async def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = rpc.build_server(address=f"unix:{path}")
    await server.start()
    async with rpc.open_channel(f"unix:{path}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
    await server.stop(0)


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        rpc.build_server(address=f"unix:{path}")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("address", ["unix:relative", "nowhere", "unix:/" + "x" * 120])
async def test_a_bad_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        rpc.build_server(address=address)


async def test_stopping_lets_a_running_stream_end(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    server = rpc.build_server(address=address)
    handler = grpc.unary_stream_rpc_method_handler(quiet)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Quiet": handler}),)
    )
    stop = asyncio.Event()
    serving = asyncio.create_task(rpc.serve_until_stopped(server, stop=stop, grace_s=30))
    async with rpc.open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        stream = channel.unary_stream("/test.Service/Quiet")(b"", timeout=30)
        assert await stream.read() == b"first"
        stop.set()
        assert await stream.read() == b"second"
        await asyncio.wait_for(serving, 30)


class Flaky:
    """Refuses the first calls."""

    def __init__(self, num_refused: int, retry_after_ms: int | None = None) -> None:
        self.num_refused = num_refused
        self.retry_after_ms = retry_after_ms
        self.moments: list[float] = []

    async def unary(self, request: bytes, context: Any) -> bytes:
        self._count()
        return b"ok"

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self._count()
        yield b"ok"

    def _count(self) -> None:
        self.moments.append(time.monotonic())
        if len(self.moments) <= self.num_refused:
            raise RequestError(
                FailureReason.DRAINING, "not now", retry_after_ms=self.retry_after_ms
            )

    async def serve(self, address: str) -> grpc.aio.Server:
        server = rpc.build_server(address=address)
        unary = grpc.unary_unary_rpc_method_handler(self.unary)
        stream = grpc.unary_stream_rpc_method_handler(self.stream)
        methods = {"GetCapacity": unary, "Other": unary, "RunSteps": stream}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("glm.v1.WorkerService", methods),)
        )
        await server.start()
        return server


async def test_an_idempotent_call_is_repeated_when_the_server_was_away(tmp_path: Path) -> None:
    flaky, address = Flaky(2), f"unix:{tmp_path}/s"
    server = await flaky.serve(address)
    async with rpc.open_channel(address) as channel:
        call = channel.unary_unary("/glm.v1.WorkerService/GetCapacity")
        assert await call(b"", timeout=30) == b"ok"
    assert len(flaky.moments) == 3
    await server.stop(0)


async def test_a_server_that_asks_for_a_pause_gets_it(tmp_path: Path) -> None:
    flaky, address = Flaky(1, retry_after_ms=400), f"unix:{tmp_path}/s"
    server = await flaky.serve(address)
    async with rpc.open_channel(address) as channel:
        call = channel.unary_unary("/glm.v1.WorkerService/GetCapacity")
        assert await call(b"", timeout=30) == b"ok"
    assert flaky.moments[1] - flaky.moments[0] >= 0.39
    await server.stop(0)


async def test_no_other_call_is_repeated(tmp_path: Path) -> None:
    flaky, address = Flaky(2), f"unix:{tmp_path}/s"
    server = await flaky.serve(address)
    async with rpc.open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/glm.v1.WorkerService/Other")(b"", timeout=30)
        assert len(flaky.moments) == 1
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in channel.unary_stream("/glm.v1.WorkerService/RunSteps")(b"", timeout=30):
                pass
    assert len(flaky.moments) == 2
    await server.stop(0)


async def test_a_message_past_the_limit_ends_that_call_only(tmp_path: Path) -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    address = f"unix:{tmp_path}/s"
    server = rpc.build_server(address=address, max_receive_mib=1)
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Echo": handler}),)
    )
    await server.start()
    async with rpc.open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        call = channel.unary_unary("/test.Service/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(b"x" * (2 << 20), timeout=30)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(b"ok", timeout=30) == b"ok"
    await server.stop(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_cancelled_task_is_told_from_a_cancelled_call() -> None:
    told: list[bool] = []

    async def wait(what: "asyncio.Future[None]") -> None:
        try:
            await what
        except asyncio.CancelledError:
            told.append(rpc.is_task_cancelled())

    loop = asyncio.get_running_loop()
    calls = [loop.create_future() for _ in range(2)]
    tasks = [asyncio.create_task(wait(call)) for call in calls]
    await asyncio.sleep(0)
    calls[0].cancel()
    tasks[1].cancel()
    await asyncio.gather(*tasks)
    assert told == [False, True]
