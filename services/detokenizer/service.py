"""One detokenizer process: client, server, health and admin, from start to the last answer."""

import asyncio

from services.detokenizer.build import BuildContext, make_call_id
from services.detokenizer.live import LiveRequests
from services.detokenizer.schedulers import Schedulers
from services.detokenizer.server import SERVICE_NAME, DetokenizerServicer, DoorSettings
from services.detokenizer.settings import DetokenizerSettings
from shared.admin import software_version
from shared.glm.tokenizer import load_vocabulary
from shared.rpc import build_server
from shared.sampling import LoadSnapshot
from shared.sides import ServiceSides, Work

# After the last end was handed over, for the writers to send it.
FLUSH_S = 0.1


class DetokenizerService:
    """Holds the parts of the process together."""

    def __init__(self, settings: DetokenizerSettings) -> None:
        """Read the tokenizer and build the parts; nothing runs yet."""
        self._settings = settings
        self._live = LiveRequests()
        context = BuildContext(
            vocabulary=load_vocabulary(settings.model),
            fingerprint=f"glm-mesh-{software_version()}",
            max_timeout_ms=int(settings.max_timeout_s * 1000),
            make_call_id=make_call_id,
        )
        self._schedulers = Schedulers(
            settings.scheduler_address,
            settings.placement_rules,
            settings.resume_limits,
            on_reach=self._show,
            on_load=self._relay,
        )
        self._servicer = DetokenizerServicer(
            context,
            self._schedulers,
            self._live,
            DoorSettings(limits=settings.reader_limits, peer_stall_s=settings.peer_stall_timeout_s),
        )
        self._sides = ServiceSides(
            settings,
            service_name=SERVICE_NAME,
            work=Work(
                num_live=lambda: len(self._live),
                refuse_new=self._refuse_new,
                instance_id=self._schedulers.instance_id,
            ),
            reason="no scheduler reached yet",
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, let running requests end, then go."""
        server = build_server(address=self._settings.address)
        self._servicer.add_to(server)
        await self._sides.serve(
            server,
            stop=stop,
            beside=(self._schedulers.run(), self._servicer.keep_ticking()),
            fail_all=self._live.abort_all,
            drain_limit_s=self._settings.drain_timeout_s,
            flush_s=FLUSH_S,
        )

    def _refuse_new(self) -> None:
        self._live.is_draining = True
        self._servicer.show_drain()

    def _relay(self, load: LoadSnapshot) -> None:
        self._servicer.show_load(load)

    def _show(self, is_reached: bool) -> None:
        self._sides.show("" if is_reached else "no scheduler can be reached")
