"""One scheduler process: engine, server, health and admin, from start to the last answer."""

import asyncio
import contextlib
import gc
import os
import socket

from services.scheduler.core import SchedulerCore
from services.scheduler.engine import Engine
from services.scheduler.server import SERVICE_NAME, build_scheduler_server
from services.scheduler.settings import SchedulerSettings
from services.scheduler.worker_client import WorkerClient
from shared.admin import AdminStatus, start_admin
from shared.errors import FailureReason, RequestError
from shared.health import HealthThread
from shared.log import get_logger
from shared.rpc import serve_until_stopped

GRACE_S = 0.5
DRAIN_POLL_S = 0.05

_log = get_logger(__name__)


class SchedulerService:
    """Holds the parts of the process together."""

    def __init__(self, settings: SchedulerSettings) -> None:
        """Build the parts; nothing runs yet."""
        self._settings = settings
        self._health: HealthThread | None = None
        self._reason = "no worker reached yet"
        link = WorkerClient(
            settings.worker_address, scheduler_id=f"{socket.gethostname()}:{os.getpid()}"
        )
        core = SchedulerCore(settings.core_config)
        self._engine = Engine(core, link, settings.engine_config, self._show)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, let running requests end, then go."""
        server = build_scheduler_server(
            self._settings.address, self._engine, self._settings.outbox_limits
        )
        drained = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            await self._start_sides(stack)
            # Everything alive by now lives for ever; later collections need not look at it.
            gc.collect()
            gc.freeze()
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._engine.run()),
                    tasks.create_task(self._drain_after(stop, drained)),
                ]
                if self._health is not None:
                    beside.append(tasks.create_task(self._health.keep_ticking()))
                await serve_until_stopped(server, stop=drained, grace_s=GRACE_S)
                for task in beside:
                    task.cancel()

    async def _start_sides(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        if settings.health_address is not None:
            self._health = HealthThread(address=settings.health_address, service=SERVICE_NAME)
            self._health.set_status(False, self._reason)
            self._health.start()
            stack.callback(self._health.stop)
        if settings.admin_address is not None:
            admin = await start_admin(
                settings.admin_address,
                "scheduler",
                self._admin_status,
                self._engine.drain,
                settings,
                described=(SERVICE_NAME,),
            )
            stack.push_async_callback(admin.stop, 0.2)

    async def _drain_after(self, stop: asyncio.Event, drained: asyncio.Event) -> None:
        """After `stop`: refuse new requests, wait for the running ones, fail what is left."""
        await stop.wait()
        self._engine.drain()
        limit_s = self._settings.drain_timeout_s
        _log.info("draining", extra={"num_live": self._engine.num_live, "limit_s": limit_s})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._engine.num_live:  # noqa: ASYNC110  # ends come from many places
                    await asyncio.sleep(DRAIN_POLL_S)
        if self._engine.num_live:
            _log.warning("drain limit reached", extra={"num_live": self._engine.num_live})
            self._engine.fail_all(RequestError(FailureReason.DRAINING, "the scheduler is stopping"))
        drained.set()

    def _admin_status(self) -> AdminStatus:
        age_s = self._engine.last_step_age_s()
        return AdminStatus(
            num_live=self._engine.num_live,
            is_draining=self._engine.is_draining,
            not_serving_reason=self._reason,
            last_step_age_ms=None if age_s is None else int(age_s * 1000),
        )

    def _show(self, reason: str) -> None:
        if reason == self._reason:
            return
        self._reason = reason
        if self._health is not None:
            self._health.set_status(not reason, reason)
