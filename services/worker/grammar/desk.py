"""Where constraints are made ready: checked once, compiled, remembered.

Runs on the event loop; checks happen in child processes, compiling in a thread that leaves the
interpreter to others. So nothing that a client sends holds up a step. Nor other constraints: each
has a short time first, and one that takes longer begins again in a second queue. Tenants take turns
in both.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from services.worker.grammar.checker import CheckLimits, GrammarChecker, OverTimeError
from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.turns import Turns
from shared import tracing
from shared.constraint import Constraint, PrepareOrder
from shared.errors import CheckpointError, FailureReason, RequestError
from shared.log import get_logger
from shared.tasks import hear

_log = get_logger(__name__)

_MAX_VERDICTS: Final = 4096
_MAX_WAITING: Final = 64
# With a second of processor time for each, as long as whoever asks for one may wait.
_MAX_HEAVY: Final = 32
# Twenty objects of ten fields take half of it.
_SHORT_CPU_S: Final = 0.05


class _Errand:
    """One constraint on its way through the checks."""

    def __init__(self, order: PrepareOrder) -> None:
        self.order = order
        self.task: asyncio.Task[None] | None = None
        self.is_checking = False
        self.is_left = False

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        self.is_checking = True
        try:
            yield
        finally:
            self.is_checking = False


class GrammarDesk:
    """Prepares constraints for the rows of this worker. One event loop uses it."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        short: GrammarChecker,
        full: GrammarChecker,
        *,
        max_waiting: int = _MAX_WAITING,
        max_heavy: int = _MAX_HEAVY,
    ) -> None:
        """`short` bounds a check to little time, `full` to all that it may take."""
        self.compiler = compiler
        self._short, self._short_turns = short, Turns(max_waiting)
        self._full, self._full_turns = full, Turns(max_heavy)
        self._warming: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()
        # By digest: why a constraint was refused, None if it was not.
        self._verdicts: OrderedDict[bytes, RequestError | None] = OrderedDict()

    @classmethod
    def of_checkpoint(cls, path: Path, limits: CheckLimits | None = None) -> "GrammarDesk":
        """For the tokenizer of a checkpoint."""
        full = limits or CheckLimits()
        short = dataclasses.replace(full, cpu_s=min(_SHORT_CPU_S, full.cpu_s))
        compiler = GrammarCompiler.of_checkpoint(path)
        return cls(compiler, GrammarChecker(path, short), GrammarChecker(path, full))

    def warm(self) -> None:
        """Get ready for the first constraint: a tokenizer to compile it, a child to check it.

        The child for heavy ones starts with the first of them; most workers never see any.
        """
        self._warming = asyncio.get_running_loop().create_task(self._warm())

    async def _warm(self) -> None:
        try:
            await asyncio.to_thread(self.compiler.load)
        except CheckpointError as error:
            _log.warning("constraints will be refused: %s", error)
            return
        self._short.warm()

    async def prepare(self, order: PrepareOrder) -> int:
        """Make it ready; microseconds that it took, 0 if it was.

        Raises:
            RequestError: It cannot be used, and why; or too many wait for their turn.
        """
        constraint = order.constraint
        if self.compiler.find(constraint) is not None:
            return 0
        started = time.perf_counter_ns()
        span = tracing.start_span(
            "worker.prepare",
            traceparent=order.traceparent,
            attributes={"request_id": order.request_id, "num_bytes": constraint.num_bytes},
        )
        with span:
            await self._check(order)
            checked_at = time.perf_counter_ns()
            await asyncio.to_thread(self._compile, constraint)
            compile_us = (time.perf_counter_ns() - checked_at) // 1000
            span.set("compile_us", compile_us)
        took_us = (time.perf_counter_ns() - started) // 1000
        _log.debug(
            "constraint ready", extra={"request_id": order.request_id, "prepare_us": took_us}
        )
        return max(1, took_us)

    async def close(self) -> None:
        """End the children."""
        if self._warming is not None:
            await asyncio.wait({self._warming})
        await asyncio.gather(self._short.close(), self._full.close())
        if self._errands:
            await asyncio.wait(self._errands)

    def _compile(self, constraint: Constraint) -> None:
        # Nothing is returned: a future that is waited for would hold the grammar.
        self.compiler.compile(constraint)

    async def _check(self, order: PrepareOrder) -> None:
        """In a task of its own, which goes away with the one who asks unless its turn has come.

        A check that has begun comes to its end: whose it is pays for it, and its verdict stays.
        """
        errand = _Errand(order)
        errand.task = asyncio.get_running_loop().create_task(self._do(errand))
        self._errands.add(errand.task)
        errand.task.add_done_callback(self._errands.discard)
        errand.task.add_done_callback(hear)
        try:
            await asyncio.shield(errand.task)
        except asyncio.CancelledError:
            errand.is_left = True
            if not errand.is_checking:
                errand.task.cancel()
            raise

    async def _do(self, errand: "_Errand") -> None:
        """Once per constraint; those that come meanwhile wait for the same verdict."""
        order = errand.order
        constraint = order.constraint
        digest = hashlib.sha256(msgspec.json.encode(constraint)).digest()
        if self._has_verdict(digest):
            return
        async with self._short_turns.turn(order.tenant_id, constraint.num_bytes):
            if self._has_verdict(digest):
                return
            with contextlib.suppress(OverTimeError), errand.checking():
                await self._check_now(self._short, constraint, digest)
                return
        if errand.is_left:
            return
        async with self._full_turns.turn(order.tenant_id, constraint.num_bytes):
            if not self._has_verdict(digest):
                with errand.checking():
                    await self._check_now(self._full, constraint, digest)

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

    async def _check_now(
        self, checker: GrammarChecker, constraint: Constraint, digest: bytes
    ) -> None:
        try:
            await checker.check(constraint)
        except RequestError as error:
            is_last = checker is self._full or not isinstance(error, OverTimeError)
            if error.reason is FailureReason.INVALID_ARGUMENT and is_last:
                self._remember(digest, error)
            raise
        self._remember(digest, None)

    def _remember(self, digest: bytes, verdict: RequestError | None) -> None:
        self._verdicts[digest] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
