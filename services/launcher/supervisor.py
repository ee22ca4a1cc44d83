"""Keeps the processes of one mesh running, from the first start to the last stop.

Until every service has been ready once, a death ends the mesh; after that it is restarted by the
law of `restarts.py`; a rank of a worker together with all ranks that it exchanges tensors with.
What ended because it was asked to (SIGTERM) is started again and no failure. Exit code 2 of a
process (settings or checkpoint are wrong) ends the mesh, for trying again cannot help, unless a
ready process of its kind serves on. Nothing is restarted silently and nothing outlives `run`.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from services.launcher.commands import Command
from services.launcher.display import Display, address_page
from services.launcher.log_tail import LogTail
from services.launcher.process import NUM_LAST_LINES, ServiceProcess, describe_exit
from services.launcher.restarts import CLEAN_PAUSE_S, MAX_RESTARTS, WINDOW_S
from services.launcher.run_dir import Failing, RunDirectory
from services.launcher.unit import Death, Unit, gather_units, is_clean

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

LOOK_S: Final = 0.25
# Beyond the drain, which only the frontend has: the others end when nothing uses them.
STOP_LIMIT_S: Final = 5.0
_WORDS: Final = {"SERVING": "ready", "NOT_SERVING": "getting ready", "UNREACHABLE": "away"}


class Supervisor:
    """The mesh as processes."""

    def __init__(
        self,
        commands: Sequence[Command],
        run_dir: RunDirectory,
        display: Display,
        *,
        url: str,
        model: str,
        version: str,
        drain_timeout_s: float = 0.0,
    ) -> None:
        """Know what to start, in which order, and what to tell about it."""
        self._run_dir = run_dir
        self._display = display
        self._facts = {"url": url, "model": model, "version": version}
        self._drain_timeout_s = drain_timeout_s
        self._processes = {
            command.service: ServiceProcess(command, LogTail(run_dir.log_path(command.service)))
            for command in commands
        }
        self._units = gather_units(self._processes.values())
        self._silent = frozenset(command.service for command in commands if not command.is_serving)
        self._states = {name: "starting" for name in self._processes if name not in self._silent}
        self._failing: dict[str, Failing] = {}
        self._is_stopping = False
        self._start_lock = asyncio.Lock()
        self._was_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failed = asyncio.Event()
        self._exit_code = EXIT_OK

    async def run(self, stop: asyncio.Event, *, start_timeout_s: float) -> int:
        """Run until `stop` is set or the mesh cannot go on; the exit code of `glm-mesh up`."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for unit in self._units:
                await self._start(unit)
                tasks.append(asyncio.create_task(self._tend(unit)))
            tasks.append(asyncio.create_task(self._follow_logs()))
            tasks += [asyncio.create_task(self._follow_health(name)) for name in self._states]
            for task in tasks:
                task.add_done_callback(self._check_task)
            await self._wait_ready(stop, start_timeout_s)
            await _first_of(stop, self._failed)
        finally:
            self._display.end_progress()
            await self._stop_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._exit_code

    def kill_all(self) -> None:
        """End everything at once, for a second Ctrl-C."""
        for unit in self._units:
            unit.kill()

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A watcher that broke would leave the mesh unwatched: then it ends."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(EXIT_FAILED, f"the launcher failed: {error!r}")

    async def _wait_ready(self, stop: asyncio.Event, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await _first_of(stop, self._failed, self._was_ready)
        except TimeoutError:
            late = [name for name, state in self._states.items() if state != "ready"]
            self._fail(EXIT_FAILED, f"not ready after {limit_s:g} s: {', '.join(late)}")
            for name in late:
                self._display.lines(self._last_lines(self._processes[name]))
            return
        self._display.end_progress()
        if self._was_ready.is_set():
            self._display.lines(
                address_page(
                    **self._facts,
                    directory=str(self._run_dir.path),
                    pids=self._pids(),
                    silent=self._silent,
                    seconds=self._display.elapsed_s,
                )
            )

    async def _start(self, unit: Unit) -> None:
        async with self._start_lock:
            if self._is_stopping:
                return
            await unit.start()
        self._write_state()

    async def _tend(self, unit: Unit) -> None:
        """Start a unit again each time one of its processes ends, as long as that is allowed."""
        while not self._is_stopping:
            deaths = await unit.wait_death()
            if self._is_stopping:
                return
            for process in unit.processes:
                if process.command.is_serving:
                    self._set_state(process.service, "ended")
            pause = self._judge(unit, deaths)
            if pause is None:
                return
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                await self._start(unit)
                for process in unit.processes:
                    self._display.line(f"{process.service}: started again, pid {process.pid}")

    def _judge(self, unit: Unit, deaths: Sequence[Death]) -> float | None:
        """Report deaths; seconds until the next start, None when the mesh ends."""
        for death in deaths:
            process, how = death.process, describe_exit(death.code)
            what = f"{process.command.title} (pid {process.pid}) ended: {how}"
            self._display.lines([what, *self._last_lines(process)])
        has_sibling = self._has_sibling(unit)
        is_hopeless = any(death.code == EXIT_USAGE for death in deaths)
        if is_hopeless and not (has_sibling and self._was_ready.is_set()):
            self._fail(EXIT_USAGE, f"{unit.told} cannot start with these settings")
            return None
        if not self._was_ready.is_set():
            self._fail(EXIT_FAILED, f"{unit.told} ended before the mesh was ready")
            return None
        if is_clean(deaths):
            self._display.line(f"{unit.told}: starting again in {CLEAN_PAUSE_S:.1f} s")
            return CLEAN_PAUSE_S
        pause = unit.policy.next_pause(time.monotonic(), has_sibling=has_sibling)
        if pause is None:
            times = f"{MAX_RESTARTS} restarts in {WINDOW_S:.0f} s"
            self._fail(EXIT_FAILED, f"{unit.told} keeps ending ({times}): giving up")
            return None
        self._tell_restart(unit, pause)
        return pause

    def _has_sibling(self, unit: Unit) -> bool:
        """Whether a ready unit of the same kind does its work meanwhile."""
        return any(
            all(
                process.is_running and self._states.get(process.service, "ready") == "ready"
                for process in other.processes
            )
            for other in self._units
            if other is not unit and other.kind == unit.kind
        )

    def _tell_restart(self, unit: Unit, pause: float) -> None:
        """On the terminal, and for `glm-mesh status` where it is more than one mishap."""
        told, num_failures = unit.told, unit.policy.num_failures
        for process in unit.processes:
            self._failing.pop(process.service, None)
            if num_failures:
                self._failing[process.service] = Failing(
                    num_failures=num_failures, next_start_at=time.time() + pause
                )
        if num_failures:
            told += f" keeps ending ({num_failures} times in a row), another {unit.kind} serves on"
        self._display.line(f"{told}: starting again in {pause:.1f} s")
        self._write_state()

    def _last_lines(self, process: ServiceProcess) -> list[str]:
        lines = process.tail.last_lines(NUM_LAST_LINES)
        return [f"  {process.service}| {line}" for line in lines]

    def _fail(self, code: int, why: str) -> None:
        self._exit_code = code
        self._display.line(f"glm-mesh: {why}")
        self._failed.set()

    async def _follow_health(self, name: str) -> None:
        from shared.health import watch  # noqa: PLC0415  # after the services have been started

        async for status in watch(self._run_dir.health_address(name)):
            self._set_state(name, _WORDS.get(status, status))

    def _set_state(self, name: str, state: str) -> None:
        self._states[name] = state
        if self._is_over:
            return
        if not self._was_ready.is_set():
            self._show_progress()
            if all(state == "ready" for state in self._states.values()):
                self._was_ready.set()
        else:
            self._display.line(f"{name}: {state}")

    async def _follow_logs(self) -> None:
        """Show warnings and errors of all services as they come, and bound their logs."""
        while True:
            if not self._failed.is_set():
                self._show_loud_lines()
                for process in self._processes.values():
                    process.tail.rotate()
            if not self._is_over and not self._was_ready.is_set():
                self._show_progress()
            await asyncio.sleep(LOOK_S)

    @property
    def _is_over(self) -> bool:
        """Whether the cause of the end was told: what the others say while they go is noise."""
        return self._is_stopping or self._failed.is_set()

    def _show_progress(self) -> None:
        worker = self._processes["worker"]  # the one that takes long
        lines = [] if self._states["worker"] == "ready" else worker.tail.last_lines(1)
        detail = lines[0].partition(": ")[2] if lines else ""
        self._display.progress(self._states, detail)

    def _show_loud_lines(self) -> None:
        for name, process in self._processes.items():
            self._display.lines([f"{name}| {line}" for line in process.tail.new_loud_lines()])

    async def _stop_all(self) -> None:
        self._is_stopping = True
        self._stopping.set()
        async with self._start_lock:  # no start is under way from here on
            # The frontend comes first: no request enters any more, and what runs may end.
            for unit in reversed(self._units):
                has_drain = unit.processes[0].service.startswith("frontend")
                limit_s = STOP_LIMIT_S + (self._drain_timeout_s if has_drain else 0)
                for process in await unit.stop(limit_s):
                    self._display.line(f"{process.service}: did not stop in {limit_s:g} s, killed")
        is_puzzling = self._exit_code == EXIT_FAILED  # wrong settings were explained in a line
        self._run_dir.clean(keep_logs=is_puzzling)
        if is_puzzling:
            self._display.line(f"logs are in {self._run_dir.path}")

    def _write_state(self) -> None:
        self._run_dir.write_state(self._facts["url"], self._pids(), self._silent, self._failing)

    def _pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items() if process.pid}


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
