import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from shared import rpc
from shared.errors import OUTCOMES, FailureReason, RequestError
from shared.rpc_errors import ExceptionGuard

SERVICE = "test.Service"


class Handlers:
    """One method per style; each raises what the test put in `raised`."""

    def __init__(self) -> None:
        self.raised: BaseException = RuntimeError("unset")
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.closed = asyncio.Event()

    async def unary(self, request: bytes, context: Any) -> bytes:
        raise self.raised

    async def generator(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            raise self.raised
        finally:
            self.closed.set()

    async def writer(self, requests: Any, context: Any) -> None:
        await read_all(requests)
        await context.write(b"first")
        raise self.raised

    async def sum_up(self, requests: Any, context: Any) -> bytes:
        await read_all(requests)
        raise self.raised

    async def sleeper(self, request: bytes, context: Any) -> bytes:
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b""


async def read_all(requests: Any) -> None:
    """A client that is still writing when its call ends has gRPC's own error, not the server's."""
    async for _ in requests:
        pass


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[tuple[Handlers, grpc.aio.Channel]]:
    handlers, address = Handlers(), f"unix:{tmp_path}/s"
    server = rpc.build_server(address=address)
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(handlers.unary),
        "Generator": grpc.unary_stream_rpc_method_handler(handlers.generator),
        "Writer": grpc.stream_stream_rpc_method_handler(handlers.writer),
        "SumUp": grpc.stream_unary_rpc_method_handler(handlers.sum_up),
        "Sleeper": grpc.unary_unary_rpc_method_handler(handlers.sleeper),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    await server.start()
    async with rpc.open_channel(address) as channel:
        # A call on a channel that is still connecting fails where that takes long.
        await asyncio.wait_for(channel.channel_ready(), 30)
        yield handlers, channel
    await server.stop(0)


async def call(channel: grpc.aio.Channel, name: str) -> None:
    path = f"/{SERVICE}/{name}"
    if name == "Generator":
        async for _ in channel.unary_stream(path)(b"", timeout=30):
            pass
    elif name == "Writer":
        async for _ in channel.stream_stream(path)(iter([b""]), timeout=30):
            pass
    elif name == "SumUp":
        await channel.stream_unary(path)(iter([b""]), timeout=30)
    else:
        await channel.unary_unary(path)(b"", timeout=30)


STYLES = ["Unary", "Generator", "Writer", "SumUp"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("reason", list(FailureReason))
async def test_a_request_error_arrives_as_itself(
    mesh: tuple[Handlers, grpc.aio.Channel], style: str, reason: FailureReason
) -> None:
    handlers, channel = mesh
    handlers.raised = RequestError(reason, "too long", field="prompt", retry_after_ms=1500)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call(channel, style)
    assert failure.value.code().name == OUTCOMES[reason].grpc_status
    error = rpc.error_from_rpc(failure.value)
    assert (error.reason, error.message) == (reason, "too long")
    assert (error.field, error.retry_after_ms) == ("prompt", 1500)


@pytest.mark.parametrize("style", STYLES)
async def test_any_other_exception_shows_an_id_and_no_text(
    mesh: tuple[Handlers, grpc.aio.Channel], style: str, caplog: pytest.LogCaptureFixture
) -> None:
    handlers, channel = mesh
    handlers.raised = ValueError("secret path /x")
    with (
        caplog.at_level(logging.ERROR, "shared.rpc_errors"),
        pytest.raises(grpc.aio.AioRpcError) as failure,
    ):
        await call(channel, style)
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    text = failure.value.details() or ""
    assert text.startswith("internal error ")
    assert "secret" not in text
    record = caplog.records[-1]
    assert record.error_id in text  # type: ignore[attr-defined]  # a field of the log line
    assert record.exc_info is not None
    assert rpc.error_from_rpc(failure.value).reason is FailureReason.INTERNAL


async def test_an_error_that_ended_a_task_group_arrives_as_itself(
    mesh: tuple[Handlers, grpc.aio.Channel],
) -> None:
    handlers, channel = mesh
    handlers.raised = ExceptionGroup("x", [RequestError(FailureReason.DRAINING, "later")])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call(channel, "Writer")
    assert rpc.error_from_rpc(failure.value).reason is FailureReason.DRAINING


async def test_huge_messages_still_arrive(mesh: tuple[Handlers, grpc.aio.Channel]) -> None:
    handlers, channel = mesh
    handlers.raised = RequestError(
        FailureReason.INVALID_ARGUMENT, "x" * 100_000, field="y" * 100_000
    )
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call(channel, "Unary")
    error = rpc.error_from_rpc(failure.value)
    assert error.reason is FailureReason.INVALID_ARGUMENT
    assert len(error.message) == 500


async def test_cancel_reaches_the_handler(mesh: tuple[Handlers, grpc.aio.Channel]) -> None:
    handlers, channel = mesh
    pending = channel.unary_unary(f"/{SERVICE}/Sleeper")(b"", timeout=30)
    await asyncio.wait_for(handlers.started.wait(), 30)
    pending.cancel()
    await asyncio.wait_for(handlers.cancelled.wait(), 30)


async def test_a_stream_whose_reader_left_is_closed(
    mesh: tuple[Handlers, grpc.aio.Channel],
) -> None:
    handlers, channel = mesh
    stream = channel.unary_stream(f"/{SERVICE}/Generator")(b"", timeout=30)
    assert await stream.read() == b"first"
    stream.cancel()
    await asyncio.wait_for(handlers.closed.wait(), 30)


async def test_an_unknown_method_keeps_its_status(
    mesh: tuple[Handlers, grpc.aio.Channel],
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call(mesh[1], "Nothing")
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, FailureReason.UPSTREAM_LOST),
        (grpc.StatusCode.DEADLINE_EXCEEDED, FailureReason.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, FailureReason.CANCELLED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, FailureReason.QUEUE_FULL),
        (grpc.StatusCode.UNKNOWN, FailureReason.INTERNAL),
    ],
)
def test_a_status_of_grpc_itself_becomes_a_reason_without_its_text(
    code: grpc.StatusCode, reason: FailureReason
) -> None:
    empty = grpc.aio.Metadata()
    error = rpc.error_from_rpc(grpc.aio.AioRpcError(code, empty, empty, details="/secret/x.sock"))
    assert error.reason is reason
    assert "secret" not in error.message


def test_the_guard_is_on_every_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    real: Callable[..., Any] = grpc.aio.server

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.extend(kwargs["interceptors"])
        return real(*args, **kwargs)

    monkeypatch.setattr(grpc.aio, "server", record)

    async def build() -> None:
        rpc.build_server(address=f"unix:{tmp_path}/s")

    asyncio.run(build())
    assert isinstance(seen[0], ExceptionGuard)
