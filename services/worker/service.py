"""One worker process: runner, server, health and admin, from start to the last answer."""

import asyncio
import contextlib
import faulthandler
import time

from services.worker.build import executor_builder
from services.worker.orders import LocalOrders, Stop
from services.worker.prefill_spans import PrefillSpans
from services.worker.runner import Runner
from services.worker.server import SERVICE_NAME, WorkerServicer
from services.worker.settings import WorkerSettings
from shared.admin import AdminStatus, start_admin
from shared.health import HealthThread
from shared.log import get_logger
from shared.rpc import build_server, serve_until_stopped

# A 1M-token prompt is 4 MiB; a plan may describe several.
_MAX_RECEIVE_MIB = 64
_GRACE_S = 1.0
_WATCH_S = 0.5
_STDERR_FD = 2

_log = get_logger(__name__)


class WorkerService:
    """Holds the parts of the process together."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._orders = LocalOrders()
        self._runner = Runner(executor_builder(settings), self._orders)
        self._servicer = WorkerServicer(self._runner, self._orders, PrefillSpans())
        self._health: HealthThread | None = None
        self._reason = "the model is loading"

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; raises what kept the executor from being built."""
        server = build_server(address=self._settings.address, max_receive_mib=_MAX_RECEIVE_MIB)
        self._servicer.add_to(server)
        async with contextlib.AsyncExitStack() as stack:
            await self._start_sides(stack)
            stack.callback(self._stop_runner)
            self._runner.start()
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._watch(stop))]
                if self._health is not None:
                    beside.append(tasks.create_task(self._health.keep_ticking()))
                await serve_until_stopped(server, stop=stop, grace_s=_GRACE_S)
                for task in beside:
                    task.cancel()
        if self._runner.ready.done():
            self._runner.ready.result()

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
                "worker",
                self._admin_status,
                self._servicer.drain,
                settings,
                described=(SERVICE_NAME,),
            )
            stack.push_async_callback(admin.stop, 0.2)

    def _admin_status(self) -> AdminStatus:
        age_s = self._runner.last_step_age_s(time.monotonic())
        return AdminStatus(
            num_live=self._runner.num_rows_in_use(),
            is_draining=self._servicer.is_draining,
            not_serving_reason=self._reason,
            last_step_age_ms=None if age_s is None else int(age_s * 1000),
        )

    async def _watch(self, stop: asyncio.Event) -> None:
        """Follow the runner: SERVING once it is ready, NOT_SERVING while a step hangs."""
        ready = asyncio.wrap_future(self._runner.ready)
        await asyncio.wait({ready})
        if ready.exception() is not None:
            stop.set()
            return
        while self._runner.is_alive:
            self._show(self._reason_not_to_serve())
            await asyncio.sleep(_WATCH_S)
        # Nothing can run a step any more: end, so that whoever started the process sees it.
        raise RuntimeError("the runner's thread died")

    def _reason_not_to_serve(self) -> str:
        if self._servicer.is_draining:
            return "draining"
        stalled_s = self._runner.stalled_s(time.monotonic())
        if stalled_s > self._settings.stall_timeout_s:
            return f"a step has taken over {self._settings.stall_timeout_s:g} s"
        return ""

    def _show(self, reason: str) -> None:
        if reason == self._reason:
            return
        if reason.startswith("a step"):
            _log.error("no progress; the stacks of all threads follow", extra={"reason": reason})
            faulthandler.dump_traceback(file=_STDERR_FD)
        self._reason = reason
        if self._health is not None:
            self._health.set_status(not reason, reason)

    def _stop_runner(self) -> None:
        self._orders.put(Stop())
        if not self._runner.join(_GRACE_S):
            _log.error("the runner's thread did not stop in time and is left behind")
