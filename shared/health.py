"""grpc.health.v1 of one process, answered by threads that the event loop cannot block.

Readiness is told by the service (`set_status`). On top of that a watchdog turns the answer to
NOT_SERVING while the event loop has not ticked for `stall_after_s`, and writes every thread's stack
to the log, so that a loop that hangs cannot look healthy.
"""

import asyncio
import faulthandler
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared.log import get_logger
from shared.rpc import build_sync_server, open_channel

TICK_S: Final = 0.5
STALL_AFTER_S: Final = 5.0
STDERR_FD: Final = 2
# Pause before a watcher asks again after a failure.
RETRY_S: Final = 0.05

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

_logger = get_logger(__name__)


class HealthThread:
    """Check and live Watch for the whole process (empty name) and for `service`."""

    def __init__(self, *, address: str, service: str, stall_after_s: float = STALL_AFTER_S) -> None:
        """Bind `address`; NOT_SERVING until `set_status` says otherwise."""
        self._names = ("", service)
        self._stall_after_s = stall_after_s
        self._servicer = health.HealthServicer()
        self._server = build_sync_server(address=address)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        self._lock = threading.Lock()
        self._is_serving = False
        self._reason = "starting"
        self._shown: tuple[bool, str] | None = None
        self._last_tick: float | None = None
        self._stopped = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="health-watchdog", daemon=True)
        self._publish()

    @property
    def reason(self) -> str:
        """Why the process is not serving; empty when it is."""
        with self._lock:
            is_serving, reason = self._effective()
            return "" if is_serving else reason

    def start(self) -> None:
        """Answer from now on; the watchdog waits for the first tick."""
        self._server.start()
        self._watchdog.start()

    def set_status(self, is_serving: bool, reason: str = "") -> None:
        """Say whether the service can do its work, and why not."""
        with self._lock:
            self._is_serving = is_serving
            self._reason = "" if is_serving else reason
        self._publish()

    def tick(self) -> None:
        """Tell the watchdog that the event loop runs."""
        self._last_tick = time.monotonic()

    async def keep_ticking(self) -> None:
        """Tick until cancelled; a task of the service's event loop."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def stop(self) -> None:
        """Say NOT_SERVING to every watcher, then end."""
        self.set_status(False, "stopping")
        self._stopped.set()
        self._server.stop(0.2).wait(2.0)
        if self._watchdog.is_alive():
            self._watchdog.join(2.0)

    def _effective(self) -> tuple[bool, str]:
        """What to show now; the lock is held."""
        tick = self._last_tick
        if tick is not None and time.monotonic() - tick > self._stall_after_s:
            return False, f"the event loop has stood still for over {self._stall_after_s:g} s"
        return self._is_serving, self._reason

    def _publish(self) -> None:
        with self._lock:
            now = self._effective()
            if now == self._shown:
                return
            before, self._shown = self._shown, now
            if before is None or before[0] != now[0]:
                for name in self._names:
                    self._servicer.set(name, _SERVING if now[0] else _NOT_SERVING)
        if now[0]:
            _logger.info("serving")
        else:
            _logger.info("not serving: %s", now[1])

    def _watch(self) -> None:
        was_stalled = False
        while not self._stopped.wait(min(TICK_S, self._stall_after_s / 4)):
            tick = self._last_tick
            is_stalled = tick is not None and time.monotonic() - tick > self._stall_after_s
            if is_stalled and not was_stalled:
                _logger.error("the event loop stands still; the stacks of all threads follow")
                faulthandler.dump_traceback(file=STDERR_FD)
            was_stalled = is_stalled
            self._publish()


async def probe(address: str, *, service: str = "", timeout_s: float = 1.0) -> str:
    """Ask a process for its health: SERVING, NOT_SERVING, SERVICE_UNKNOWN or UNREACHABLE."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            is_unknown = error.code() is grpc.StatusCode.NOT_FOUND
            return "SERVICE_UNKNOWN" if is_unknown else "UNREACHABLE"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def watch(address: str) -> AsyncIterator[str]:
    """Follow the health of a process for ever: each change, UNREACHABLE while it is away."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        shown = ""
        while True:
            # A try before the socket exists would start gRPC's back-off, which grows.
            if await asyncio.to_thread(_may_answer, address):
                async for status in _statuses(stub):
                    if status != shown:
                        shown = status
                        yield status
            if shown not in {"", "UNREACHABLE"}:
                shown = "UNREACHABLE"
                yield shown
            await asyncio.sleep(RETRY_S)


def _may_answer(address: str) -> bool:
    return not address.startswith("unix:") or Path(address.removeprefix("unix:")).exists()


async def _statuses(stub: health_pb2_grpc.HealthStub) -> AsyncIterator[str]:
    """What one Watch call says, until it breaks."""
    call = stub.Watch(health_pb2.HealthCheckRequest())
    try:
        while (answer := await call.read()) is not grpc.aio.EOF:
            yield str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    except grpc.aio.AioRpcError:
        return
    finally:
        call.cancel()
