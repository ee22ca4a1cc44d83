"""AdminService and reflection on the admin address: questions and switches for operators.

Its own address keeps drain and log level out of reach of inference clients.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from grpc_reflection.v1alpha import reflection

from protos.glm.v1 import admin_pb2, admin_pb2_grpc
from shared import log
from shared.config import ProcessSettings, shown
from shared.errors import FailureReason, RequestError
from shared.rpc import Server, build_server
from shared.sampling import ReplicaLoad
from shared.wire import replica_to_proto

CONTRACT_MINOR: Final = 1
MAX_RECEIVE_MIB: Final = 1

_SERVICE_NAME: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_logger = log.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a scheduler tells about one worker group; fields of glm.v1.ReplicaStatus."""

    load: ReplicaLoad
    last_step_age_ms: int | None = None

    @property
    def state(self) -> str:
        """In a word, what it is doing."""
        load = self.load
        if not load.is_ready:
            return "lost"
        if load.is_draining:
            return "draining" if load.num_running or load.num_waiting else "drained"
        return "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminStatus:
    """What a service tells about itself; `last_step_age_ms` is None where no steps are made."""

    num_live: int = 0
    is_draining: bool = False
    not_serving_reason: str = ""
    last_step_age_ms: int | None = None
    replicas: Sequence[ReplicaStatus] = ()


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Answers for one process."""

    def __init__(
        self,
        service: str,
        status_source: Callable[[], AdminStatus],
        drain: Callable[[], None],
        settings: ProcessSettings,
        drain_replica: Callable[[int, bool], int] | None = None,
        instance_id: str = "",
    ) -> None:
        """Keep where the answers come from."""
        self._instance_id = instance_id or uuid.uuid4().hex
        self._service = service
        self._status_source = status_source
        self._drain = drain
        self._drain_replica = drain_replica
        self._settings = shown(settings)
        self._started = time.monotonic()

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: object
    ) -> admin_pb2.GetStatusResponse:
        """Version, state and settings."""
        status = self._status_source()
        return admin_pb2.GetStatusResponse(
            service=self._service,
            version=software_version(),
            contract_minor=CONTRACT_MINOR,
            uptime_ms=int((time.monotonic() - self._started) * 1000),
            num_live=status.num_live,
            is_draining=status.is_draining,
            not_serving_reason=status.not_serving_reason,
            last_step_age_ms=status.last_step_age_ms,
            settings=[
                admin_pb2.Setting(name=name, value=value) for name, value in self._settings.items()
            ],
            num_tasks=len(asyncio.all_tasks()),
            instance_id=self._instance_id,
            replicas=[
                admin_pb2.ReplicaStatus(
                    replica=number,
                    state=replica.state,
                    load=replica_to_proto(replica.load),
                    last_step_age_ms=replica.last_step_age_ms,
                )
                for number, replica in enumerate(status.replicas)
            ],
        )

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: object
    ) -> admin_pb2.DrainResponse:
        """Refuse new requests from now on."""
        _logger.info("drain asked for by an operator")
        self._drain()
        return admin_pb2.DrainResponse(num_live=self._status_source().num_live)

    async def DrainReplica(
        self, request: admin_pb2.DrainReplicaRequest, context: object
    ) -> admin_pb2.DrainReplicaResponse:
        """Give one replica nothing new, or undo that."""
        if self._drain_replica is None:
            text = f"the {self._service} has no replicas"
            raise RequestError(FailureReason.INVALID_ARGUMENT, text, field="replica")
        num_live = self._drain_replica(request.replica, request.is_draining)
        return admin_pb2.DrainReplicaResponse(num_live=num_live)

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: object
    ) -> admin_pb2.SetLogLevelResponse:
        """Change the level of the process."""
        try:
            log.set_level(request.level)
        except ValueError as error:
            raise RequestError(FailureReason.INVALID_ARGUMENT, str(error), field="level") from None
        _logger.info("log level is now %s", request.level)
        return admin_pb2.SetLogLevelResponse()


async def start_admin(
    address: str,
    service: str,
    status_source: Callable[[], AdminStatus],
    drain: Callable[[], None],
    settings: ProcessSettings,
    *,
    described: Sequence[str] = (),
    drain_replica: Callable[[int, bool], int] | None = None,
    instance_id: str = "",
) -> Server:
    """Serve AdminService and reflection on `address`; the caller stops the server.

    Args:
        address: Where operators ask.
        service: frontend, detokenizer, scheduler or worker.
        status_source: Asked for every GetStatus.
        drain: Called for Drain; idempotent.
        settings: Shown with secrets blanked.
        described: Full names of the process's other services, for reflection.
        drain_replica: Called for DrainReplica with its number and whether it drains; returns what
            is live there. None where there are no replicas.
        instance_id: Names this run where the service tells it elsewhere too; a new one otherwise.
    """
    server = build_server(address=address, max_receive_mib=MAX_RECEIVE_MIB)
    servicer = AdminServicer(
        service, status_source, drain, settings, drain_replica, instance_id=instance_id
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    names = (_SERVICE_NAME, reflection.SERVICE_NAME, *described)
    reflection.enable_server_reflection(names, server)
    await server.start()
    return server


def software_version() -> str:
    """Version of the installed distribution."""
    return metadata.version("glm-mesh")
