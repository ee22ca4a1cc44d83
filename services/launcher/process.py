"""One service as a child process: start, end within a bound, and how it ended."""

import asyncio
import contextlib
import os
import signal
from typing import Final

from services.launcher.commands import Command
from services.launcher.log_tail import LogTail

NUM_LAST_LINES: Final = 12
KILL_LIMIT_S: Final = 5.0


class ServiceProcess:
    """A service that may be started several times, once at a time."""

    def __init__(self, command: Command, tail: LogTail) -> None:
        """Know how to start it and where it writes."""
        self.command = command
        self.tail = tail
        self._process: asyncio.subprocess.Process | None = None

    @property
    def service(self) -> str:
        """Its name."""
        return self.command.service

    @property
    def pid(self) -> int:
        """Process id of the present or last run; 0 before the first."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C reaches the launcher alone."""
        self.tail.mark()
        # O_APPEND: output of two runs never overwrites each other.
        log = os.open(self.tail.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.command.environment),
                start_new_session=True,
            )
        finally:
            os.close(log)

    async def wait(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, limit_s: float) -> bool:
        """SIGTERM, then SIGKILL after `limit_s`; whether it ended by itself."""
        if not self.is_running:
            return True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), limit_s)
        except TimeoutError:
            self.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), KILL_LIMIT_S)
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to it and to whatever it started."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
