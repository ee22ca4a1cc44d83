"""Puts a gateway together, runs it, and takes it down in order: refuse, finish, close."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from typing import Final

from services.frontend import server
from services.frontend.admission import Admission
from services.frontend.app import create_app
from services.frontend.background import BackgroundWork
from services.frontend.detokenizers import Detokenizers
from services.frontend.gateway import Gateway
from services.frontend.http_server import HttpServer, bind, raise_file_limit
from services.frontend.metrics import GatewayMetrics
from services.frontend.render import Renderer
from services.frontend.response_store import ResponseStore, StoreBounds
from services.frontend.sampling import Seeds, sampling_defaults
from services.frontend.settings import FrontendSettings, checkpoint_context_length
from services.frontend.shared_quota import SharedCounts
from services.frontend.streams import StreamKeeper
from shared.errors import ConfigError, FailureReason, RequestError
from shared.glm.dialect import Dialect
from shared.log import get_logger
from shared.sides import ServiceSides, Work, freeze_heap

READY_POLL_S: Final = 0.2
GRPC_GRACE_S: Final = 2.0
# For handlers to tell their clients that the server stops.
FAREWELL_S: Final = 1.0
# For requests on connections that came just before the listener closed.
LATE_S: Final = 0.2
# At most so long a process that is new on a shared port waits for a detokenizer.
JOIN_S: Final = 3.0
JOIN_POLL_S: Final = 0.02

_logger = get_logger(__name__)


def build_gateway(settings: FrontendSettings) -> Gateway:
    """Everything that handlers share; `ConfigError` or `CheckpointError` if something is wrong."""
    dialect = Dialect.load(settings.model)
    length = checkpoint_context_length(settings.model)
    asked = settings.max_model_len
    if asked is not None and asked > length:
        raise ConfigError(
            f"--max-model-len {asked}: the checkpoint's context is {length} tokens long"
        )
    metrics = GatewayMetrics(
        settings.model_names[0],
        load=lambda: detokenizers.load,
        num_ready=lambda: detokenizers.num_ready,
    )
    detokenizers = Detokenizers(
        settings.detokenizer_address,
        credit_bytes=settings.stream_credit_bytes,
        bounds=settings.resubmit_bounds,
        silence_s=settings.silence_timeout_s,
        on_resubmit=metrics.count_resubmission,
    )
    return Gateway(
        settings=settings,
        dialect=dialect,
        renderer=Renderer(
            dialect,
            num_threads=settings.num_render_threads,
            max_waiting=settings.max_waiting_renders,
        ),
        detokenizers=detokenizers,
        admission=Admission(
            settings.max_concurrent_requests,
            # One body of the allowed size always fits.
            max(settings.max_held_body_bytes, settings.max_body_bytes),
        ),
        metrics=metrics,
        keeper=StreamKeeper(
            keep_alive_s=settings.sse_keep_alive_interval,
            stall_s=settings.client_stall_timeout_s,
            max_s=settings.request_timeout_s + 5.0,
        ),
        responses=open_store(settings),
        background=BackgroundWork(),
        defaults=sampling_defaults(dialect.generation_defaults, dialect.eos_token_ids),
        seeds=Seeds(settings.seed),
        context_length=asked or length,
        started_s=int(time.time()),
        key_counts=SharedCounts(settings.key_limits_path) if settings.key_limits_path else None,
    )


def open_store(settings: FrontendSettings) -> ResponseStore:
    """Where responses are kept; `ConfigError` for a path that cannot be used."""
    path = settings.response_store_path
    bounds = StoreBounds(
        max_responses=settings.max_stored_responses,
        max_bytes=settings.max_stored_response_bytes,
        ttl_s=settings.stored_response_ttl_s,
    )
    try:
        return ResponseStore(path, bounds)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"--response-store-path {path}: {error}") from None


@contextlib.asynccontextmanager
async def at_work(gateway: Gateway) -> AsyncIterator[None]:
    """Connected to the detokenizers, and all that works beside requests, while inside."""
    tasks = [
        asyncio.create_task(gateway.detokenizers.run()),
        asyncio.create_task(gateway.keeper.run()),
        asyncio.create_task(gateway.background.watch(gateway.responses)),
    ]
    try:
        yield
    finally:
        await gateway.background.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.renderer.close()
        gateway.responses.close()
        if gateway.key_counts is not None:
            gateway.key_counts.close()


@contextlib.asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[HttpServer]:
    """The HTTP side, while inside."""
    settings = gateway.settings
    http = HttpServer(
        create_app(gateway),
        # Last, so that nothing that fails before leaves it open.
        bind(settings.host, settings.port, is_shared=settings.reuse_port),
        stall_s=settings.client_stall_timeout_s,
    )
    try:
        await http.start()
        yield http
    finally:
        await http.stop()


async def run(settings: FrontendSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`, then drain."""
    gateway = build_gateway(settings)
    raise_file_limit()
    rpc_server = server.build_server(gateway, settings.address)
    http: HttpServer | None = None

    def refuse_new() -> None:
        if http is not None and settings.reuse_port:
            leave_port(gateway, http)
        else:
            gateway.admission.drain()

    async with contextlib.AsyncExitStack() as stack:
        sides = ServiceSides(
            settings,
            service_name=server.SERVICE_NAME,
            work=Work(num_live=lambda: gateway.admission.num_running, refuse_new=refuse_new),
            reason="starting",
        )
        await sides.start(stack)
        await stack.enter_async_context(at_work(gateway))
        if await _may_listen(gateway, stop):
            http = await stack.enter_async_context(listening(gateway))
            await rpc_server.start()
            stack.push_async_callback(rpc_server.stop, GRPC_GRACE_S)
            _logger.info("listening on http://%s:%d", settings.host, http.port)
            for beside in (sides.keep_ticking(), _tell_health(gateway, sides)):
                stack.callback(asyncio.create_task(beside).cancel)
            freeze_heap()
        await stop.wait()
        if http is not None:
            await drain(gateway, http)


async def _may_listen(gateway: Gateway, stop: asyncio.Event) -> bool:
    """Whether there is something to listen for; on a shared port, once it can be served.

    Others can serve there what this process would have to refuse: it joins them when it has a
    detokenizer, or when none came in time.
    """

    def is_over() -> bool:
        return stop.is_set() or gateway.admission.is_draining

    peers = gateway.detokenizers
    if gateway.settings.reuse_port:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                while not (peers.num_ready or is_over()):  # noqa: ASYNC110  # told by no event
                    await asyncio.sleep(JOIN_POLL_S)
    return not is_over()


def leave_port(gateway: Gateway, http: HttpServer) -> None:
    """Leave new connections to others on the port; those that came are served a moment longer."""
    http.stop_listening()
    asyncio.get_running_loop().call_later(LATE_S, _refuse_new, gateway, http)


def _refuse_new(gateway: Gateway, http: HttpServer) -> None:
    gateway.admission.drain()
    if gateway.settings.reuse_port:
        http.close_idle()


async def drain(gateway: Gateway, http: HttpServer) -> None:
    """Take no more, and wait for what is in work, within the limit.

    On a port that others listen on too, nobody has to be refused: clients come to them instead.
    """
    if gateway.settings.reuse_port:
        http.stop_listening()
        await asyncio.sleep(LATE_S)
    _refuse_new(gateway, http)
    await _wait_until_idle(gateway, gateway.settings.drain_timeout_s)
    if gateway.admission.num_running:
        # A failed end that the client can read, not a cut socket.
        gateway.detokenizers.fail_all(
            RequestError(FailureReason.DRAINING, "the server is stopping")
        )
        await _wait_until_idle(gateway, FAREWELL_S)
    _logger.info("drained", extra={"num_left": gateway.admission.num_running})


async def _wait_until_idle(gateway: Gateway, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await gateway.admission.wait_until_idle()


async def _tell_health(gateway: Gateway, sides: ServiceSides) -> None:
    """Show the state of the chain."""
    while True:
        sides.show(gateway.not_ready_reason)
        await asyncio.sleep(READY_POLL_S)
