"""What each rank does in drills: it works until something happens, then tells what it knows."""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from services.worker.model.decoder import Decoder
from services.worker.orders import Stop
from services.worker.parallel.groups import RankGroup
from services.worker.settings import WorkerSettings
from tests.services.worker.parallel.executor_cases import Replica, rank_settings, start
from tests.services.worker.plans import MiniScheduler

LIMIT_S = 4.0
"""Of a step. A machine that is busy with other things answers pulses late."""
_AFTER_STEPS = 3
_PATIENCE_S = 20.0


def _never_return(*_: Any, **__: Any) -> Any:
    threading.Event().wait()


def _fail(*_: Any, **__: Any) -> Any:
    raise ValueError("the fan stopped")


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


_ACCIDENTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    # An exchange of Gloo that a process leaves is noticed at once; one that it never joins is not.
    "exchange": (RankGroup, "all_reduce", _never_return),
    "hang": (Decoder, "forward", _never_return),
    "exception": (Decoder, "forward", _fail),
    # Behind an exchange of the step: the others are in it too, however late they came.
    "kill": (RankGroup, "all_reduce", _die),
    "freeze": (Decoder, "forward", _freeze),
}


def run_drill(
    rank: int, rendezvous: str, path: str, topology: str, accident: str, victim: int
) -> dict[str, Any]:
    """Steps until an accident happens to one rank, and what this rank hears of it."""
    settings = rank_settings(
        rank, rendezvous, path, topology, stall_timeout_s=LIMIT_S, enforce_eager=True
    )
    world, runner, orders = start(settings)
    if rank == victim:
        _plant(_ACCIDENTS[accident])
    replica = None
    if settings.is_leader:
        replica = Replica(runner, orders)
        scheduler = MiniScheduler(replica)
        scheduler.add([3, 1, 4, 1, 5], max_tokens=100, ignore_eos=True)
        for _ in range(_AFTER_STEPS):
            scheduler.run_step()
    else:
        runner.ready.result(40)
    began = time.monotonic()
    stepping = None
    if replica is not None:
        # Nobody may ever answer it.
        stepping = threading.Thread(target=_step, args=(scheduler,), daemon=True)
        stepping.start()
    while not world.verdict and time.monotonic() - began < 30:
        time.sleep(0.02)
    seconds = time.monotonic() - began
    if stepping is not None and rank == victim:
        stepping.join(_PATIENCE_S)  # its runner lives, and answers
    failure = replica.last.failure if replica is not None and replica.last is not None else None
    return {
        "verdict": world.verdict,
        "seconds": seconds,
        "failure": failure and failure.message,
    }


def _step(scheduler: MiniScheduler) -> None:
    with contextlib.suppress(AssertionError, queue.Empty):
        scheduler.run_step()


def _plant(accident: tuple[type, str, Callable[..., Any]]) -> None:
    """Let it happen in the step after the given ones; one call proves the model at its start."""
    owner, name, act = accident
    real, num_forwards = getattr(owner, name), 0

    def call(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        if owner is Decoder:
            is_due = num_forwards > 1 + _AFTER_STEPS
        else:
            position = self._progress.position()
            is_due = position.step > _AFTER_STEPS and (act is not _die or position.num_meetings > 0)
        return act() if is_due else real(self, *args, **named)

    setattr(owner, name, call)


def start_differently(
    rank: int, rendezvous: str, path: str, topology: str, flags: list[dict[str, Any]]
) -> str:
    """What a rank says that was not started like the others."""
    settings: WorkerSettings = rank_settings(rank, rendezvous, path, topology, **flags[rank])
    _, runner, orders = start(settings)
    try:
        runner.ready.result(40)
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return f"{type(error).__name__}: {error}"
    orders.put(Stop())
    return "started"
