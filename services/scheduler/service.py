"""One scheduler process: engine, server, health and admin, from start to the last answer."""

import asyncio
import os
import socket

from services.scheduler.core import SchedulerCore
from services.scheduler.engine import Engine
from services.scheduler.server import (
    CACHE_SERVICE_NAME,
    SERVICE_NAME,
    build_scheduler_server,
)
from services.scheduler.settings import SchedulerSettings
from services.scheduler.worker_client import WorkerClient
from shared.sides import ServiceSides, Work


class SchedulerService:
    """Holds the parts of the process together."""

    def __init__(self, settings: SchedulerSettings) -> None:
        """Build the parts; nothing runs yet."""
        self._settings = settings
        links = [
            WorkerClient(address, scheduler_id=f"{socket.gethostname()}:{os.getpid()}")
            for address in settings.worker_address
        ]
        core = SchedulerCore(settings.core_config, num_replicas=len(links))
        worlds = [links] if settings.enable_expert_parallel else [[link] for link in links]
        self._engine = Engine(core, worlds, settings.engine_config, self._show)
        self._sides = ServiceSides(
            settings,
            service_name=SERVICE_NAME,
            work=Work(
                num_live=lambda: self._engine.num_live,
                refuse_new=self._engine.drain,
                last_step_age_s=self._engine.last_step_age_s,
                replicas=self._engine.replica_statuses,
                drain_replica=self._engine.drain_replica,
                instance_id=self._engine.instance_id,
            ),
            reason="no worker reached yet",
            further_services=(CACHE_SERVICE_NAME,),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, let running requests end, then go."""
        server = build_scheduler_server(
            self._settings.address, self._engine, self._settings.outbox_limits
        )
        await self._sides.serve(
            server,
            stop=stop,
            beside=(self._engine.run(),),
            fail_all=self._engine.fail_all,
            drain_limit_s=self._settings.drain_timeout_s,
        )

    def _show(self, reason: str) -> None:
        self._sides.show(reason)
