"""What every gRPC service has beside its work: health, admin and the order in which it stops.

The law of stopping: on `stop` the service refuses what is new, waits for what is running up to a
limit, fails what is left so that its owner can read why, and only then closes its socket.
"""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shared.admin import AdminStatus, ReplicaStatus, start_admin
from shared.config import ServiceSettings
from shared.errors import FailureReason, RequestError
from shared.health import HealthThread
from shared.log import get_logger
from shared.rpc import Server, serve_until_stopped

DRAIN_POLL_S: Final = 0.05
# For calls that are still open after the drain.
SERVER_GRACE_S: Final = 0.5
ADMIN_GRACE_S: Final = 0.2

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a service tells its sides about its work.

    `refuse_new` is idempotent; `num_live` counts what has not ended; `replicas` and `drain_replica`
    are those of `admin.py`, and so is `instance_id`.
    """

    num_live: Callable[[], int]
    refuse_new: Callable[[], None]
    last_step_age_s: Callable[[], float | None] = lambda: None
    replicas: Callable[[], Sequence[ReplicaStatus]] = tuple
    drain_replica: Callable[[int, bool], int] | None = None
    instance_id: str = ""


def freeze_heap() -> None:
    """Everything alive by now lives for ever; later collections need not look at it.

    A look at all of it takes a tenth of a second, in which no request gets a token.
    """
    gc.collect()
    gc.freeze()


class ServiceSides:
    """Health and admin of one process.

    Args:
        settings: The process's settings.
        service_name: Full name of its gRPC service.
        work: What it does.
        reason: Why it is not serving yet.
        further_services: Full names of what else it serves, for reflection.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        service_name: str,
        work: Work,
        reason: str,
        further_services: Sequence[str] = (),
    ) -> None:
        """Nothing runs yet."""
        self._settings = settings
        self._service_name = service_name
        self._further_services = further_services
        self._work = work
        self._reason = reason
        self._is_draining = False
        self._health: HealthThread | None = None

    @property
    def reason(self) -> str:
        """Why the service is not serving; empty when it is."""
        return "draining" if self._is_draining else self._reason

    def show(self, reason: str) -> None:
        """Say why the service is not serving; empty when it is."""
        self._reason = reason
        self._show()

    def drain(self) -> None:
        """Refuse what is new from now on. Idempotent."""
        self._is_draining = True
        self._work.refuse_new()
        self._show()

    async def serve(
        self,
        server: Server,
        *,
        stop: asyncio.Event,
        beside: Sequence[Coroutine[Any, Any, None]],
        fail_all: Callable[[RequestError], None],
        drain_limit_s: float,
        flush_s: float = 0.0,
    ) -> None:
        """Serve until `stop`, drain, then go.

        Args:
            server: The service's own server, not started.
            stop: Set when the process is to end.
            beside: Run as tasks while the server runs.
            fail_all: Ends what outlasts the limit.
            drain_limit_s: For running work.
            flush_s: After the last end was handed over, for writers to send it.
        """
        drained = asyncio.Event()
        drain = self._drain_after(stop, drained, fail_all, drain_limit_s, flush_s)
        async with contextlib.AsyncExitStack() as stack:
            await self.start(stack)
            freeze_heap()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work) for work in (*beside, drain, self.keep_ticking())]
                await serve_until_stopped(server, stop=drained, grace_s=SERVER_GRACE_S)
                for task in tasks:
                    task.cancel()

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Answer health and admin until the stack unwinds."""
        settings = self._settings
        if settings.health_address is not None:
            self._health = HealthThread(address=settings.health_address, service=self._service_name)
            self._show()
            self._health.start()
            stack.callback(self._health.stop)
        if settings.admin_address is not None:
            admin = await start_admin(
                settings.admin_address,
                settings.service,
                self._admin_status,
                self.drain,
                settings,
                described=(self._service_name, *self._further_services),
                drain_replica=self._work.drain_replica,
                instance_id=self._work.instance_id,
            )
            stack.push_async_callback(admin.stop, ADMIN_GRACE_S)

    async def keep_ticking(self) -> None:
        """Tell the watchdog that the event loop runs, until cancelled."""
        if self._health is not None:
            await self._health.keep_ticking()

    async def _drain_after(
        self,
        stop: asyncio.Event,
        drained: asyncio.Event,
        fail_all: Callable[[RequestError], None],
        limit_s: float,
        flush_s: float,
    ) -> None:
        await stop.wait()
        self.drain()
        num_live = self._work.num_live
        _logger.info("draining", extra={"num_live": num_live(), "limit_s": limit_s})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while num_live():  # noqa: ASYNC110  # ends come from many places
                    await asyncio.sleep(DRAIN_POLL_S)
        if num_live():
            _logger.warning("drain limit reached", extra={"num_live": num_live()})
            text = f"the {self._settings.service} is stopping"
            fail_all(RequestError(FailureReason.DRAINING, text))
        await asyncio.sleep(flush_s)
        drained.set()

    def _admin_status(self) -> AdminStatus:
        age_s = self._work.last_step_age_s()
        return AdminStatus(
            num_live=self._work.num_live(),
            is_draining=self._is_draining,
            not_serving_reason=self.reason,
            last_step_age_ms=None if age_s is None else int(age_s * 1000),
            replicas=self._work.replicas(),
        )

    def _show(self) -> None:
        if self._health is not None:
            self._health.set_status(not self.reason, self.reason)
