"""One worker process: runner, server, health and admin, from start to the last answer."""

import asyncio
import contextlib
import faulthandler
import threading
import time

from services.worker.build import executor_builder
from services.worker.orders import LocalOrders, Stop
from services.worker.prefill_spans import PrefillSpans
from services.worker.runner import BuildStoppedError, Runner
from services.worker.server import SERVICE_NAME, WorkerServicer
from services.worker.settings import WorkerSettings
from shared.log import get_logger
from shared.rpc import build_server, serve_until_stopped
from shared.sides import ServiceSides, Work

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
        self._is_stopping = threading.Event()
        build = executor_builder(settings, self._is_stopping.is_set)
        self._runner = Runner(build, self._orders)
        self._servicer = WorkerServicer(self._runner, self._orders, PrefillSpans())
        self._reason = "the model is loading"
        self._sides = ServiceSides(
            settings,
            service_name=SERVICE_NAME,
            work=Work(
                num_live=self._runner.num_rows_in_use,
                refuse_new=self._servicer.drain,
                last_step_age_s=lambda: self._runner.last_step_age_s(time.monotonic()),
            ),
            reason=self._reason,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; raises what kept the executor from being built."""
        server = build_server(address=self._settings.address, max_receive_mib=_MAX_RECEIVE_MIB)
        self._servicer.add_to(server)
        async with contextlib.AsyncExitStack() as stack:
            await self._sides.start(stack)
            stack.callback(self._stop_runner)
            self._runner.start()
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._watch(stop)),
                    tasks.create_task(self._sides.keep_ticking()),
                ]
                await serve_until_stopped(server, stop=stop, grace_s=_GRACE_S)
                for task in beside:
                    task.cancel()
        with contextlib.suppress(BuildStoppedError):
            if self._runner.ready.done():
                self._runner.ready.result()

    async def _watch(self, stop: asyncio.Event) -> None:
        """Follow the runner: SERVING once it is ready, NOT_SERVING while a step hangs."""
        ready = asyncio.wrap_future(self._runner.ready)
        # `run` raises it; when the process stops before, nobody else would have looked at it.
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
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
        self._sides.show(reason)

    def _stop_runner(self) -> None:
        self._is_stopping.set()
        self._orders.put(Stop())
        if not self._runner.join(_GRACE_S):
            _log.error("the runner's thread did not stop in time and is left behind")
