"""Checks constraints in a child process that is killed when it takes too long.

One check at a time. The child is started when it is needed first, and again after it died.
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

_log = get_logger(__name__)

_START_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """Bounds of one check; the wall clock only steps in where the child does not run at all."""

    cpu_s: float = 1.0
    wall_s: float = 8.0
    memory_bytes: int = 1 << 30


class GrammarChecker:
    """Owns the child. One task at a time uses it."""

    def __init__(self, model: Path, limits: CheckLimits | None = None) -> None:
        self._model = model
        self._limits = limits or CheckLimits()
        self._child: Process | None = None

    async def check(self, constraint: Constraint) -> None:
        """Return if it can be used.

        Raises:
            RequestError: It cannot, and why; or there is no child to ask.
        """
        ask = msgspec.json.encode(constraint)
        child = await self._alive()
        try:
            async with asyncio.timeout(self._limits.wall_s):
                verdict = await _ask(child, ask)
        except TimeoutError:
            await self.close()
            # Not its fault: its own time is bounded, and was not over.
            raise _not_now() from None
        except (OSError, EOFError):
            raise await self._why_it_died(child) from None
        except BaseException:
            await self.close()  # whoever asked went away: its answer would meet the next one
            raise
        if verdict.message:
            raise RequestError(FailureReason.INVALID_ARGUMENT, verdict.message, field=verdict.field)

    async def close(self) -> None:
        """Kill the child, if there is one."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        # The transport closes the pipes; without it their objects outlive the loop.
        child._transport.close()  # type: ignore[attr-defined]  # no public way

    async def _alive(self) -> Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        limits = self._limits
        self._child = child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.worker.grammar.child"),
            *(str(self._model), str(limits.cpu_s), str(limits.memory_bytes)),
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(),
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await _read(child)
        except (OSError, EOFError, TimeoutError):
            await self.close()
            _log.exception("the process that checks constraints did not start")
            raise _not_now() from None
        except BaseException:
            await self.close()
            raise
        return child

    async def _why_it_died(self, child: Process) -> RequestError:
        code = await child.wait()
        await self.close()
        _log.warning("a constraint ended the process that checked it", extra={"code": code})
        if code == -signal.SIGPROF:
            text = f"checking it takes over {self._limits.cpu_s:g} s of processor time"
        else:
            text = "checking it takes too much memory"
        return refused("constraint", text)


def _not_now() -> RequestError:
    return RequestError(
        FailureReason.UPSTREAM_LOST,
        "constraint: it cannot be checked now, the machine is too busy",
        field="constraint",
        retry_after_ms=1000,
    )


async def _ask(child: Process, ask: bytes) -> Verdict:
    assert child.stdin is not None
    child.stdin.write(LENGTH.pack(len(ask)) + ask)
    await child.stdin.drain()
    return msgspec.json.decode(await _read(child), type=Verdict)


async def _read(child: Process) -> bytes:
    assert child.stdout is not None
    (size,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    return await child.stdout.readexactly(size)


def _environment() -> Mapping[str, str]:
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}
