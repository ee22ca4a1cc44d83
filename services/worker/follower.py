"""The process of a rank that does not lead: a runner without a server of its own.

It obeys what its leader passes on and ends with it. Health and admin are answered as everywhere;
`--address` is the leader's.
"""

import asyncio
import contextlib
import faulthandler
import threading
import time
from typing import Final

from services.worker.build import executor_builder
from services.worker.orders import LocalOrders
from services.worker.runner import BuildStoppedError, Runner, WorldLostError
from services.worker.server import SERVICE_NAME
from services.worker.service import enter_world
from services.worker.settings import WorkerSettings
from shared.sides import ServiceSides, Work

_WATCH_S: Final = 0.2
_STDERR_FD: Final = 2
_GRACE_S: Final = 5.0
"""A leader that was told to stop as well lets its requests end first."""


class FollowerService:
    """Holds the parts of the process together."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._is_stopping = threading.Event()
        self._world, source = enter_world(settings, LocalOrders())
        build = executor_builder(settings, self._is_stopping.is_set, self._world)
        self._runner = Runner(build, source)
        self._sides = ServiceSides(
            settings,
            service_name=SERVICE_NAME,
            work=Work(
                num_live=self._runner.num_rows_in_use,
                refuse_new=lambda: None,
                last_step_age_s=lambda: self._runner.last_step_age_s(time.monotonic()),
            ),
            reason="the model is loading",
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Obey until the leader stops, or for a while after `stop`.

        Raises:
            WorldLostError: A rank is lost.
        """
        async with contextlib.AsyncExitStack() as stack:
            await self._sides.start(stack)
            self._runner.start()
            async with asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(self._sides.keep_ticking())
                loss = await self._watch(stop)
                ticking.cancel()
        if loss:
            raise WorldLostError(loss)
        with contextlib.suppress(BuildStoppedError):
            self._runner.ready.result(timeout=0)
            # It ended by the leader's order, as every other rank does.
            self._world.leave()

    async def _watch(self, stop: asyncio.Event) -> str:
        """Why the world is lost; empty when the leader ended it."""
        shown, stopped_at = False, 0.0
        while self._runner.is_alive:
            if self._world.verdict:
                self._sides.show(self._world.verdict)
                faulthandler.dump_traceback(file=_STDERR_FD)
                return self._world.verdict
            if self._runner.ready.done() and not shown:
                self._sides.show("")
                shown = True
            if stop.is_set():
                self._is_stopping.set()
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() - stopped_at > _GRACE_S:
                    return "told to stop while its leader goes on"
            await asyncio.sleep(_WATCH_S)
        return await self._world.why_lost() if self._runner.is_lost else ""
