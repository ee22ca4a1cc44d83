"""Checks constraints in processes that die when they take too much.

One check at a time. A child, started ahead of the first check, has the tokenizer and forks for each
one; should it be lost itself, the next one is started at once.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from services.worker.grammar.child import LENGTH, Verdict
from services.worker.grammar.writer import refused
from shared.constraint import Constraint
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.parent import PARENT_VARIABLE
from shared.tasks import hear

_log = get_logger(__name__)

_START_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """Bounds of one check.

    Attributes:
        cpu_s: Processor time.
        wall_s: Time without a sign that the check gets on.
        memory_bytes: What it may take beyond the tokenizer.
    """

    cpu_s: float = 1.0
    wall_s: float = 8.0
    memory_bytes: int = 1 << 30


class OverTimeError(RequestError):
    """A check took more processor time than it may."""


class GrammarChecker:
    """Owns the child. One task at a time uses it."""

    def __init__(self, model: Path, limits: CheckLimits | None = None) -> None:
        self._model = model
        self._limits = limits or CheckLimits()
        self._child: Process | None = None
        self._starting: asyncio.Task[Process] | None = None
        self._is_closed = False
        # A check that nobody waits for any more: its answer comes before that of the next one.
        self._left: asyncio.Task[Verdict] | None = None

    def warm(self) -> None:
        """Have a child started, if there is none; what goes wrong the next check tells."""
        if self._is_closed or self._starting is not None or self._is_alive:
            return
        self._starting = asyncio.get_running_loop().create_task(self._start())
        self._starting.add_done_callback(self._started)

    async def check(self, constraint: Constraint) -> None:
        """Return if it can be used.

        Raises:
            RequestError: It cannot, and why; or there is no child to ask.
        """
        await self._settle()
        verdict = await self._verdict(constraint)
        if verdict.message:
            raise RequestError(FailureReason.INVALID_ARGUMENT, verdict.message, field=verdict.field)
        if verdict.exit_code:
            raise self._why_it_ended(verdict.exit_code)

    async def _verdict(self, constraint: Constraint) -> Verdict:
        """Of a child, or of the next one where it was lost: not by the check, which has a fork."""
        for is_last in (False, True):
            child = await self._alive()
            ask = _ask(child, msgspec.json.encode(constraint), self._limits.wall_s)
            asked = asyncio.get_running_loop().create_task(ask)
            asked.add_done_callback(hear)
            try:
                return await asyncio.shield(asked)
            except asyncio.CancelledError:
                self._left = asked
                raise
            except TimeoutError:
                await self._replace()
                # Not its fault: its own time is bounded, and was not over.
                raise _not_now() from None
            except (OSError, EOFError):
                code = await child.wait()
                await self._replace()
                _log.warning("the process that checks constraints ended", extra={"code": code})
                if is_last:
                    raise _not_now() from None
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        """Kill the child, if there is one; there will be no other."""
        self._is_closed = True
        await self._kill()
        if self._left is not None:
            await asyncio.wait({self._left})

    async def _settle(self) -> None:
        """Let the check that nobody waits for come to its end; a child that broke it goes."""
        if self._left is None:
            return
        await asyncio.wait({self._left})
        left, self._left = self._left, None
        if left.cancelled() or left.exception() is not None:
            await self._replace()

    async def _replace(self) -> None:
        """Kill the child and start another one, which nobody waits for."""
        await self._kill()
        self.warm()

    async def _kill(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        child, self._child = self._child, None
        if child is not None:
            await _end(child)

    @property
    def _is_alive(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def _alive(self) -> Process:
        if self._child is not None and self._is_alive:
            return self._child
        self.warm()
        if self._starting is None:
            raise _not_now()
        # Whoever stops waiting does not stop the child: the next one needs it.
        return await asyncio.shield(self._starting)

    def _started(self, task: "asyncio.Task[Process]") -> None:
        if self._starting is task:
            self._starting = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            text = "the process that checks constraints did not start"
            _log.error(text, exc_info=error)

    async def _start(self) -> Process:
        dead, self._child = self._child, None
        if dead is not None:
            await _end(dead)  # its pipes are still open
        limits = self._limits
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.worker.grammar.child"),
            *(str(self._model), str(limits.cpu_s), str(limits.memory_bytes)),
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(),
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await _read(child)
        except BaseException as error:
            await _end(child)
            if isinstance(error, OSError | EOFError | TimeoutError):
                raise _not_now() from error
            raise
        self._child = child
        return child

    def _why_it_ended(self, code: int) -> RequestError:
        """What the end of a check's process says about the constraint."""
        _log.info("a check of a constraint ended its process", extra={"code": code})
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return _not_now()  # somebody else's doing: it is not the constraint that was wrong
        if code == -signal.SIGPROF:
            text = f"checking it takes over {self._limits.cpu_s:g} s of processor time"
            told = refused("constraint", text)
            return OverTimeError(told.reason, told.message, field=told.field)
        if code == -signal.SIGABRT:  # how the engine ends without any
            return refused("constraint", "checking it takes too much memory")
        return refused("constraint", f"checking it ended its process ({_ending(code)})")


def _not_now() -> RequestError:
    return RequestError(
        FailureReason.UPSTREAM_LOST,
        "constraint: it cannot be checked now, the process for it was lost or had no time",
        field="constraint",
        retry_after_ms=1000,
    )


def _ending(code: int) -> str:
    """How a process ended, in words."""
    return signal.Signals(-code).name if code < 0 else f"code {code}"


async def _end(child: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()
    # The transport closes the pipes; without it their objects outlive the loop.
    child._transport.close()  # type: ignore[attr-defined]  # no public way


async def _ask(child: Process, ask: bytes, wall_s: float) -> Verdict:
    assert child.stdin is not None
    now = asyncio.get_running_loop().time
    async with asyncio.timeout(wall_s) as limit:
        try:
            child.stdin.write(LENGTH.pack(len(ask)) + ask)
        except RuntimeError as error:  # what uvloop makes of a pipe that has just been closed
            raise ConnectionResetError(str(error)) from None
        await child.stdin.drain()
        while not (answer := await _read(child)):
            limit.reschedule(now() + wall_s)  # it gets on: how slowly is not its fault
    return msgspec.json.decode(answer, type=Verdict)


async def _read(child: Process) -> bytes:
    assert child.stdout is not None
    (size,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    return await child.stdout.readexactly(size)


def _environment() -> Mapping[str, str]:
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}
