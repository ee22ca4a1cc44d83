"""Processes that live and end together: one service, or all ranks of a worker's world.

Law: either all processes of a unit run, or the unit is on its way there. The first that ends takes
the others with it, at once: they may wait for it in an exchange that no signal but SIGKILL ends.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.launcher.process import ServiceProcess
from services.launcher.restarts import RestartPolicy

# Ranks that end of one cause are told together, the cause before those that it cost their world.
_ECHO_S: Final = 0.2
EXIT_WORLD_LOST: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How one process of a unit ended by itself."""

    process: ServiceProcess
    code: int


def is_clean(deaths: Sequence[Death]) -> bool:
    """Whether a service ended because it was asked to, by SIGTERM: it drained and had no error."""
    codes = {death.code for death in deaths}
    return 0 in codes and codes <= {0, EXIT_WORLD_LOST}


class Unit:
    """Processes of one failure unit, in the order of their start."""

    def __init__(self, name: str, processes: Sequence[ServiceProcess]) -> None:
        """Know what belongs together."""
        self.name = name
        self.processes = tuple(processes)
        self.policy = RestartPolicy()

    @property
    def told(self) -> str:
        """What a message calls it."""
        first = self.processes[0].service
        if len(self.processes) == 1:
            return first
        return f"{first} (all ranks of {self.name})"

    @property
    def kind(self) -> str:
        """The service that it is part of."""
        return self.processes[0].command.kind

    async def start(self) -> None:
        """Start every process, at a new place to meet."""
        for meeting in {process.command.meeting for process in self.processes}:
            if meeting is not None:
                meeting.unlink(missing_ok=True)
        for process in self.processes:
            await process.start()

    async def wait_death(self) -> list[Death]:
        """Wait until a process ends, then end the others; those that ended by themselves."""
        waits = {asyncio.create_task(process.wait()): process for process in self.processes}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if len(waits) > 1:
                await asyncio.wait(waits, timeout=_ECHO_S)
            deaths = [
                Death(process=process, code=wait.result())
                for wait, process in waits.items()
                if wait.done()
            ]
            for process in self.processes:
                process.kill()
            await asyncio.wait(waits)
        finally:
            for wait in waits:
                wait.cancel()
        return sorted(deaths, key=lambda death: death.code == EXIT_WORLD_LOST)

    async def stop(self, limit_s: float) -> list[ServiceProcess]:
        """End every process; those that had to be killed."""
        ended = await asyncio.gather(*(process.stop(limit_s) for process in self.processes))
        return [
            process for process, is_ended in zip(self.processes, ended, strict=True) if not is_ended
        ]

    def kill(self) -> None:
        """End every process at once."""
        for process in self.processes:
            process.kill()


def gather_units(processes: Iterable[ServiceProcess]) -> list[Unit]:
    """Processes by the units of their commands, in order."""
    members: dict[str, list[ServiceProcess]] = {}
    for process in processes:
        members.setdefault(process.command.unit, []).append(process)
    return [Unit(name, found) for name, found in members.items()]
