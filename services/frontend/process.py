"""Puts a gateway together, runs it, and takes it down in order: refuse, finish, close."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from typing import Final

from services.frontend import server
from services.frontend.admission import Admission
from services.frontend.app import create_app
from services.frontend.detokenizer_client import DetokenizerClient
from services.frontend.gateway import Gateway
from services.frontend.http_server import HttpServer, bind, raise_file_limit
from services.frontend.metrics import GatewayMetrics
from services.frontend.render import Renderer
from services.frontend.sampling import sampling_defaults
from services.frontend.settings import FrontendSettings, checkpoint_context_length
from services.frontend.streams import StreamKeeper
from shared.admin import AdminStatus, start_admin
from shared.errors import ConfigError, FailureReason, RequestError
from shared.glm.dialect import Dialect
from shared.health import HealthThread
from shared.log import get_logger
from shared.rpc import Server

READY_POLL_S: Final = 0.2
GRPC_GRACE_S: Final = 2.0
# For handlers to tell their clients that the server stops.
FAREWELL_S: Final = 1.0

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
    client = DetokenizerClient(
        settings.detokenizer_address, credit_bytes=settings.stream_credit_bytes
    )
    return Gateway(
        settings=settings,
        dialect=dialect,
        renderer=Renderer(
            dialect,
            num_threads=settings.num_render_threads,
            max_waiting=settings.max_waiting_renders,
        ),
        client=client,
        admission=Admission(
            settings.max_concurrent_requests,
            # One body of the allowed size always fits.
            max(settings.max_held_body_bytes, settings.max_body_bytes),
        ),
        metrics=GatewayMetrics(settings.model_names[0], lambda: client.load),
        keeper=StreamKeeper(
            keep_alive_s=settings.sse_keep_alive_interval,
            stall_s=settings.client_stall_timeout_s,
            max_s=settings.request_timeout_s + 5.0,
        ),
        defaults=sampling_defaults(dialect.generation_defaults, dialect.eos_token_ids),
        context_length=asked or length,
        started_s=int(time.time()),
    )


@contextlib.asynccontextmanager
async def running_http(gateway: Gateway) -> AsyncIterator[HttpServer]:
    """The HTTP side and the connection to the detokenizer, while inside."""
    settings = gateway.settings
    http = HttpServer(create_app(gateway), bind(settings.host, settings.port))
    tasks = [asyncio.create_task(gateway.client.run()), asyncio.create_task(gateway.keeper.run())]
    try:
        await http.start()
        yield http
    finally:
        await http.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.renderer.close()


async def run(settings: FrontendSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    gateway = build_gateway(settings)
    raise_file_limit()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    rpc_server = server.build_server(gateway, settings.address)
    async with contextlib.AsyncExitStack() as stack:
        health = _start_health(settings)
        if health is not None:
            stack.callback(health.stop)
        http = await stack.enter_async_context(running_http(gateway))
        await rpc_server.start()
        stack.push_async_callback(rpc_server.stop, GRPC_GRACE_S)
        if settings.admin_address is not None:
            admin = await _start_admin(settings, gateway)
            stack.push_async_callback(admin.stop, GRPC_GRACE_S)
        _logger.info("listening on http://%s:%d", settings.host, http.port)
        watcher = asyncio.create_task(_tell_health(gateway, health))
        stack.callback(watcher.cancel)
        await stop.wait()
        await drain(gateway)


async def drain(gateway: Gateway) -> None:
    """Take no more, and wait for what is in work, within the limit."""
    gateway.admission.drain()
    await _wait_until_idle(gateway, gateway.settings.drain_timeout_s)
    if gateway.admission.num_running:
        # A failed end that the client can read, not a cut socket.
        gateway.client.fail_all(RequestError(FailureReason.DRAINING, "the server is stopping"))
        await _wait_until_idle(gateway, FAREWELL_S)
    _logger.info("drained", extra={"num_left": gateway.admission.num_running})


async def _wait_until_idle(gateway: Gateway, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await gateway.admission.wait_until_idle()


def _start_health(settings: FrontendSettings) -> HealthThread | None:
    if settings.health_address is None:
        return None
    health = HealthThread(address=settings.health_address, service=server.SERVICE_NAME)
    health.start()
    return health


async def _start_admin(settings: FrontendSettings, gateway: Gateway) -> Server:
    def status() -> AdminStatus:
        return AdminStatus(
            num_live=gateway.admission.num_running,
            is_draining=gateway.admission.is_draining,
            not_serving_reason=gateway.not_ready_reason,
        )

    return await start_admin(
        settings.admin_address or "",
        settings.service,
        status,
        gateway.admission.drain,
        settings,
        described=(server.SERVICE_NAME,),
    )


async def _tell_health(gateway: Gateway, health: HealthThread | None) -> None:
    """Show the state of the chain, and that this loop turns."""
    while health is not None:
        reason = gateway.not_ready_reason
        health.set_status(not reason, reason)
        health.tick()
        await asyncio.sleep(READY_POLL_S)
