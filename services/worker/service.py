"""One worker process: runner, server, health and admin, from start to the last answer."""

import asyncio
import contextlib
import faulthandler
import threading
import time
from typing import TYPE_CHECKING, Protocol

from services.worker.build import RankBuilder, executor_builder
from services.worker.orders import LocalOrders, OrderSource, Stop
from services.worker.prefill_spans import PrefillSpans
from services.worker.runner import BuildStoppedError, Runner, WorldLostError
from services.worker.server import SERVICE_NAME, WorkerServicer, read_plan
from services.worker.settings import WorkerSettings
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.rpc import build_server, serve_until_stopped
from shared.sides import ServiceSides, Work

if TYPE_CHECKING:  # a replay worker does without the engine
    from services.worker.grammar.compiler import GrammarCompiler
    from services.worker.grammar.desk import GrammarDesk

# A 1M-token prompt is 4 MiB; a plan may describe several.
_MAX_RECEIVE_MIB = 64
_GRACE_S = 1.0
_WATCH_S = 0.5
_STDERR_FD = 2

_log = get_logger(__name__)


class World(RankBuilder, Protocol):
    """The other ranks of a world, as the process knows them."""

    @property
    def verdict(self) -> str:
        """Why the world is lost, naming rank and step; empty while it stands."""
        ...

    async def why_lost(self) -> str:
        """The verdict, which may be a moment away after an exchange broke."""
        ...

    def leave(self) -> None:
        """Give the seat up in good order."""
        ...


def enter_world(
    settings: WorkerSettings, orders: LocalOrders, grammars: "GrammarCompiler | None" = None
) -> tuple[World, OrderSource]:
    """This rank's world, and the orders of its replica: the leader's own, or what it passes on."""
    # Here and not above: a replay worker starts in a fraction of torch's import time.
    from services.worker.parallel.world_rank import WorldRank  # noqa: PLC0415

    rank = WorldRank(settings, grammars)
    return rank, rank.lead(orders) if settings.is_leader else rank.follow(read_plan)


def open_desk(settings: WorkerSettings) -> "GrammarDesk | None":
    """Where constraints are prepared; a replay worker has none."""
    if settings.worker_mode == "replay":
        return None
    # Here and not above: a replay worker starts in a fraction of the engine's import time.
    from services.worker.grammar.desk import GrammarDesk  # noqa: PLC0415

    assert settings.model is not None
    return GrammarDesk.of_checkpoint(settings.model)


class WorkerService:
    """Holds the parts of the process together."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._orders = LocalOrders()
        self._is_stopping = threading.Event()
        self._world: World | None = None
        self._loss = ""
        source: OrderSource = self._orders
        self._desk = open_desk(settings)
        grammars = self._desk.compiler if self._desk is not None else None
        if settings.topology.joint_size > 1:
            self._world, source = enter_world(settings, self._orders, grammars)
        build = executor_builder(settings, self._is_stopping.is_set, self._world, grammars)
        self._runner = Runner(build, source)
        self._servicer = WorkerServicer(self._runner, self._orders, PrefillSpans(), self._desk)
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
            if self._desk is not None:
                stack.push_async_callback(self._desk.close)
            self._runner.start()
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._watch(stop)),
                    tasks.create_task(self._sides.keep_ticking()),
                ]
                await serve_until_stopped(server, stop=stop, grace_s=_GRACE_S)
                for task in beside:
                    task.cancel()
        if self._loss:
            raise WorldLostError(self._loss)
        with contextlib.suppress(BuildStoppedError):
            if self._runner.ready.done():
                self._runner.ready.result()

    async def _watch(self, stop: asyncio.Event) -> None:
        """Follow the runner: SERVING once it is ready, NOT_SERVING while a step hangs."""
        ready = asyncio.wrap_future(self._runner.ready)
        # `run` raises it; when the process stops before, nobody else would have looked at it.
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not ready.done() and not self._is_lost():
            await asyncio.wait({ready}, timeout=_WATCH_S)
        if not ready.done() or ready.exception() is not None:
            self._lose(self._world.verdict if self._world is not None else "")
            stop.set()
            return
        if self._desk is not None:
            self._desk.warm()
        while self._runner.is_alive and not self._is_lost():
            self._show(self._reason_not_to_serve())
            await asyncio.sleep(_WATCH_S)
        if self._world is not None:
            self._lose(await self._world.why_lost())
            stop.set()
            return
        # Nothing can run a step any more: end, so that whoever started the process sees it.
        raise RuntimeError("the runner's thread died")

    def _is_lost(self) -> bool:
        return self._world is not None and bool(self._world.verdict)

    def _lose(self, reason: str) -> None:
        """Requests end with the reason; whoever started the process starts the world again."""
        if reason:
            self._loss = reason
            self._show(reason)
            self._servicer.fail(RequestError(FailureReason.UPSTREAM_LOST, reason))

    def _reason_not_to_serve(self) -> str:
        if self._world is not None:
            return ""  # the ranks watch each other, and know who is waited for
        stalled_s = self._runner.stalled_s(time.monotonic())
        if stalled_s > self._settings.stall_timeout_s:
            return f"a step has taken over {self._settings.stall_timeout_s:g} s"
        return ""

    def _show(self, reason: str) -> None:
        if reason == self._reason:
            return
        if reason.startswith(("a step", "no progress")):
            _log.error("no progress; the stacks of all threads follow", extra={"reason": reason})
            faulthandler.dump_traceback(file=_STDERR_FD)
        self._reason = reason
        self._sides.show(reason)

    def _stop_runner(self) -> None:
        self._is_stopping.set()
        self._orders.put(Stop())
        if not self._runner.join(_GRACE_S):
            _log.error("the runner's thread did not stop in time and is left behind")
        elif self._world is not None and not self._world.verdict:
            self._world.leave()
