"""Where constraints are made ready: checked once, compiled, remembered.

Runs on the event loop; checks happen in a child process and one at a time, compiling in a thread
that leaves the interpreter to others. So nothing that a client sends holds up a step.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from pathlib import Path
from typing import Final

import msgspec

from services.worker.grammar.checker import CheckLimits, GrammarChecker
from services.worker.grammar.compiler import GrammarCompiler
from shared import tracing
from shared.constraint import Constraint
from shared.errors import CheckpointError, FailureReason, RequestError
from shared.log import get_logger

_log = get_logger(__name__)

_MAX_VERDICTS: Final = 4096
_MAX_WAITING: Final = 64


class GrammarDesk:
    """Prepares constraints for the rows of this worker. One event loop uses it."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        checker: GrammarChecker,
        *,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        self.compiler = compiler
        self._checker = checker
        self._max_waiting = max_waiting
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._warming: asyncio.Task[None] | None = None
        # By digest: why a constraint was refused, None if it was not.
        self._verdicts: OrderedDict[bytes, RequestError | None] = OrderedDict()

    @classmethod
    def of_checkpoint(cls, path: Path, limits: CheckLimits | None = None) -> "GrammarDesk":
        """For the tokenizer of a checkpoint."""
        return cls(GrammarCompiler.of_checkpoint(path), GrammarChecker(path, limits))

    def warm(self) -> None:
        """Get ready for the first constraint: a tokenizer to compile it, a child to check it."""
        self._warming = asyncio.get_running_loop().create_task(self._warm())

    async def _warm(self) -> None:
        try:
            await asyncio.to_thread(self.compiler.load)
        except CheckpointError as error:
            _log.warning("constraints will be refused: %s", error)
            return
        self._checker.warm()

    async def prepare(self, constraint: Constraint, request_id: str, traceparent: str) -> int:
        """Make it ready; microseconds that it took, 0 if it was.

        Raises:
            RequestError: It cannot be used, and why; or too many wait for their turn.
        """
        if self.compiler.find(constraint) is not None:
            return 0
        started = time.perf_counter_ns()
        span = tracing.start_span(
            "worker.prepare",
            traceparent=traceparent,
            attributes={"request_id": request_id, "num_bytes": constraint.num_bytes},
        )
        with span:
            await self._check(constraint)
            checked_at = time.perf_counter_ns()
            await asyncio.to_thread(self._compile, constraint)
            compile_us = (time.perf_counter_ns() - checked_at) // 1000
            span.set("compile_us", compile_us)
        took_us = (time.perf_counter_ns() - started) // 1000
        _log.debug("constraint ready", extra={"request_id": request_id, "prepare_us": took_us})
        return max(1, took_us)

    async def close(self) -> None:
        """End the child."""
        if self._warming is not None:
            await asyncio.wait({self._warming})
        await self._checker.close()

    def _compile(self, constraint: Constraint) -> None:
        # Nothing is returned: a future that is waited for would hold the grammar.
        self.compiler.compile(constraint)

    async def _check(self, constraint: Constraint) -> None:
        """Once per constraint; those that come meanwhile wait for the same verdict."""
        digest = hashlib.sha256(msgspec.json.encode(constraint)).digest()
        if self._has_verdict(digest):
            return
        if self._num_waiting >= self._max_waiting:
            raise RequestError(
                FailureReason.QUEUE_FULL,
                f"{self._num_waiting} constraints wait to be checked",
                field="constraint",
                retry_after_ms=1000,
            )
        self._num_waiting += 1
        try:
            async with self._turn:
                if not self._has_verdict(digest):
                    await self._check_now(constraint, digest)
        finally:
            self._num_waiting -= 1

    def _has_verdict(self, digest: bytes) -> bool:
        """Whether it was found good; one that was not is refused again."""
        if digest not in self._verdicts:
            return False
        self._verdicts.move_to_end(digest)
        known = self._verdicts[digest]
        if known is not None:
            # A new error each time: one that is raised again and again keeps every traceback.
            raise RequestError(known.reason, known.message, field=known.field)
        return True

    async def _check_now(self, constraint: Constraint, digest: bytes) -> None:
        try:
            await self._checker.check(constraint)
        except RequestError as error:
            if error.reason is FailureReason.INVALID_ARGUMENT:
                self._remember(digest, error)
            raise
        self._remember(digest, None)

    def _remember(self, digest: bytes, verdict: RequestError | None) -> None:
        self._verdicts[digest] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
