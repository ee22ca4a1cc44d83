"""One detokenizer process: client, server, health and admin, from start to the last answer."""

import asyncio
import contextlib
import gc

from services.detokenizer.build import BuildContext, make_call_id
from services.detokenizer.live import LiveRequests
from services.detokenizer.scheduler_client import SchedulerClient
from services.detokenizer.server import SERVICE_NAME, DetokenizerServicer, DoorSettings
from services.detokenizer.settings import DetokenizerSettings
from shared.admin import AdminStatus, software_version, start_admin
from shared.errors import FailureReason, RequestError
from shared.glm.tokenizer import load_vocabulary
from shared.health import HealthThread
from shared.log import get_logger
from shared.rpc import build_server, serve_until_stopped
from shared.sampling import LoadSnapshot

GRACE_S = 0.5
DRAIN_POLL_S = 0.05
# After the last end was handed over, for the writers to send it.
FLUSH_S = 0.1

_log = get_logger(__name__)


class DetokenizerService:
    """Holds the parts of the process together."""

    def __init__(self, settings: DetokenizerSettings) -> None:
        """Read the tokenizer and build the parts; nothing runs yet."""
        self._settings = settings
        self._health: HealthThread | None = None
        self._reason = "no scheduler reached yet"
        self._live = LiveRequests()
        context = BuildContext(
            vocabulary=load_vocabulary(settings.model),
            fingerprint=f"glm-mesh-{software_version()}",
            max_timeout_ms=int(settings.max_timeout_s * 1000),
            make_call_id=make_call_id,
        )
        self._client = SchedulerClient(
            settings.scheduler_address, on_state=self._show, on_load=self._relay
        )
        self._servicer = DetokenizerServicer(
            context,
            self._client,
            self._live,
            DoorSettings(limits=settings.reader_limits, peer_stall_s=settings.peer_stall_timeout_s),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, let running requests end, then go."""
        server = build_server(address=self._settings.address)
        self._servicer.add_to(server)
        drained = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            await self._start_sides(stack)
            # Everything alive by now lives for ever; later collections need not look at it.
            gc.collect()
            gc.freeze()
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._client.run()),
                    tasks.create_task(self._servicer.keep_ticking()),
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
                "detokenizer",
                self._admin_status,
                self._drain,
                settings,
                described=(SERVICE_NAME,),
            )
            stack.push_async_callback(admin.stop, 0.2)

    async def _drain_after(self, stop: asyncio.Event, drained: asyncio.Event) -> None:
        """After `stop`: refuse new requests, wait for the running ones, fail what is left."""
        await stop.wait()
        self._drain()
        limit_s = self._settings.drain_timeout_s
        _log.info("draining", extra={"num_live": len(self._live), "limit_s": limit_s})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self._live):  # noqa: ASYNC110  # ends come from many places
                    await asyncio.sleep(DRAIN_POLL_S)
        if len(self._live):
            _log.warning("drain limit reached", extra={"num_live": len(self._live)})
            self._live.abort_all(
                RequestError(FailureReason.DRAINING, "the detokenizer is stopping")
            )
        await asyncio.sleep(FLUSH_S)
        drained.set()

    def _drain(self) -> None:
        self._live.is_draining = True
        self._show_status()

    def _admin_status(self) -> AdminStatus:
        return AdminStatus(
            num_live=len(self._live),
            is_draining=self._live.is_draining,
            not_serving_reason=self._reason,
        )

    def _relay(self, load: LoadSnapshot) -> None:
        self._servicer.show_load(load)

    def _show(self, is_connected: bool) -> None:
        self._reason = "" if is_connected else "the scheduler cannot be reached"
        if not is_connected:
            # Frontends would go on to believe the last snapshot of a scheduler that is gone.
            self._servicer.show_load(LoadSnapshot())
        self._show_status()

    def _show_status(self) -> None:
        reason = "draining" if self._live.is_draining else self._reason
        if self._health is not None:
            self._health.set_status(not reason, reason)
