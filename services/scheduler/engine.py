"""The loop around the core: plans to the worker, results back, deliveries out, clocks read.

One event loop, nothing blocks on it, and the core is only touched between awaits. An epoch has a
sender (wakes when there may be something to plan), a receiver and a timer; whichever stops ends it.
When it ends the sequences wait for the next epoch; if none stands after `worker_grace_s` they fail.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core import SchedulerCore
from services.scheduler.draft_counts import DraftWatch
from services.scheduler.messages import Delivery, Submission, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.plan import (
    Capacity,
    StepPlan,
    StepResult,
    WorkerContractError,
    WorkerLostError,
)
from services.scheduler.spans import record_spans
from shared import tracing
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.sampling import LoadSnapshot

# Deadlines, grace and load snapshots are looked at so often.
TICK_S = 0.1
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0

_log = get_logger(__name__)


class Session(Protocol):
    """An open epoch at a worker."""

    capacity: Capacity

    async def send(self, plan: StepPlan) -> None:
        """Hand a plan over."""

    async def receive(self) -> StepResult:
        """The next result."""
        ...

    async def close(self) -> None:
        """End the epoch."""


class WorkerLink(Protocol):
    """How to reach a worker."""

    async def open(self, max_plans_in_flight: int) -> Session:
        """Open an epoch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Times of the loop, seconds; `worker_grace_s` is what sequences wait for a lost worker."""

    max_plans_in_flight: int = 1
    step_timeout_s: float = 60.0
    worker_grace_s: float = 1.2


class Engine:
    """Owns the core; every event of the process passes here.

    Args:
        core: The decisions.
        link: The worker.
        config: Times.
        show: Told why the scheduler cannot serve; empty when it can.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        core: SchedulerCore,
        link: WorkerLink,
        config: EngineConfig,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no worker."""
        self._core = core
        self._link = link
        self._config = config
        self._show = show
        self._clock = clock
        self._wake = asyncio.Event()
        self._sinks: dict[Outlet, Callable[[Delivery], None]] = {}
        self._flush_due = asyncio.Event()
        self._is_draining = False
        # When the worker was lost; None while an epoch stands or was never there.
        self._lost_at: float | None = None
        # Since when the oldest plan in flight is the worker's next one.
        self._step_since: float | None = None
        self._last_step_at: float | None = None
        self._load = core.load()
        self._load_changed = asyncio.Event()
        self._drafts = DraftWatch()

    # -- clients -----------------------------------------------------------------------------

    def open_outlet(self, sink: Callable[[Delivery], None]) -> Outlet:
        """A new client; `sink` takes its deliveries and never waits."""
        outlet = Outlet()
        self._sinks[outlet] = sink
        return outlet

    def close_outlet(self, outlet: Outlet) -> None:
        """The client is gone: its sequences end. May be called again."""
        if self._sinks.pop(outlet, None) is not None:
            self._core.close_outlet(outlet, self._clock())
            self._notice()

    def submit(self, submission: Submission, outlet: Outlet) -> list[Verdict]:
        """Take a request in or refuse it; one verdict per sequence."""
        verdicts = self._core.submit(submission, outlet, self._clock())
        refusal = verdicts[0].refusal if verdicts else None
        if refusal is not None:
            _log.info(
                "refused: %s",
                refusal.message,
                extra={"request_id": submission.request_id, "reason": refusal.reason.name},
            )
        else:
            _log.debug("admitted", extra={"request_id": submission.request_id})
        self._notice()
        return verdicts

    def abort(
        self, outlet: Outlet, stream_id: int, reason: AbortReason, num_tokens_kept: int
    ) -> None:
        """End one sequence of a client."""
        self._core.abort(outlet, stream_id, reason, num_tokens_kept, self._clock())
        self._notice()

    def abort_request(self, request_id: str) -> int:
        """End a request by its id; returns how many sequences were live."""
        count = self._core.abort_request(request_id, self._clock())
        self._notice()
        return count

    def drain(self) -> None:
        """Refuse new requests from now on; running ones end by themselves."""
        self._is_draining = True
        self._core.refuse_new(
            RequestError(FailureReason.DRAINING, "the scheduler is draining", retry_after_ms=1000)
        )
        self._show("draining")

    def fail_all(self, error: RequestError) -> None:
        """End every live sequence, and tell the clients at once."""
        self._core.fail_all(error, self._clock())
        self._flush()

    async def watch_load(self) -> AsyncIterator[LoadSnapshot]:
        """The state now, then each change, at most ten per second."""
        changed = self._load_changed
        shown = self._core.load()
        yield shown
        while True:
            await changed.wait()
            changed = self._load_changed
            if self._load != shown:
                shown = self._load
                yield shown

    # -- state -------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return self._core.num_live

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused for good."""
        return self._is_draining

    def last_step_age_s(self) -> float | None:
        """Seconds since the last result; None before the first."""
        return None if self._last_step_at is None else self._clock() - self._last_step_at

    # -- the loop ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_time())
            tasks.create_task(self._deliver())
            tasks.create_task(self._run_epochs())

    async def _run_epochs(self) -> None:
        """One epoch after the other, with a pause that grows while none makes a step."""
        backoff_s = MIN_BACKOFF_S
        while True:
            started_at = self._clock()
            error = await self._run_epoch()
            if self._last_step_at is not None and self._last_step_at >= started_at:
                backoff_s = MIN_BACKOFF_S
            self._lose(error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _run_epoch(self) -> WorkerLostError | WorkerContractError:
        """Open an epoch and serve it; returns what ended it."""
        try:
            session = await self._link.open(self._config.max_plans_in_flight)
        except (WorkerLostError, WorkerContractError) as error:
            return error
        tasks: list[asyncio.Task[None]] = []
        try:
            self._core.worker_opened(session.capacity, self._clock())
            self._worker_is_back(session.capacity)
            tasks = [
                asyncio.create_task(part)
                for part in (self._send(session), self._receive(session), self._time_steps())
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return _cause(done)
        except WorkerContractError as error:
            return error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await session.close()

    async def _send(self, session: Session) -> None:
        """Plan whenever something happened, for as long as the window allows."""
        while True:
            self._wake.clear()
            while (plan := self._core.plan(self._clock())) is not None:
                if self._step_since is None:
                    self._step_since = self._clock()
                await session.send(plan)
            await self._wake.wait()

    async def _receive(self, session: Session) -> None:
        """Take results; the next plan goes out before the clients are told."""
        while True:
            result = await session.receive()
            if self._flush_due.is_set():
                self._flush()  # the columns of a message hold one step: stream_ids are distinct
            now = self._clock()
            self._core.take_result(result, now)
            self._last_step_at = now
            self._step_since = now if self._core.num_in_flight else None
            self._notice()

    async def _deliver(self) -> None:
        """Tell the clients whenever something gathered; a task, so that its errors are seen."""
        while True:
            await self._flush_due.wait()
            self._flush()

    async def _time_steps(self) -> None:
        """End the epoch when a step takes too long, or none is planned though work waits."""
        limit_s = self._config.step_timeout_s
        unplanned_since: float | None = None
        while True:
            await asyncio.sleep(min(TICK_S, limit_s / 4))
            now = self._clock()
            if self._step_since is not None and now - self._step_since > limit_s:
                step = self._core.last_planned_step - self._core.num_in_flight + 1
                raise WorkerLostError(f"step {step} has had no result for {limit_s:g} s")
            if self._core.num_in_flight or not self._core.num_live:
                unplanned_since = None
            elif unplanned_since is None:
                unplanned_since = now
            elif now - unplanned_since > limit_s:
                raise WorkerLostError(f"work has waited {limit_s:g} s and no step was planned")

    async def _keep_time(self) -> None:
        """Deadlines, the grace of a lost worker, load snapshots."""
        while True:
            now = self._clock()
            self._core.tick(now)
            if self._lost_at is not None and now - self._lost_at >= self._config.worker_grace_s:
                self._give_up(now)
            self._flush()
            load = self._core.load()
            if load != self._load:
                self._load = load
                self._drafts.look(load)
                changed, self._load_changed = self._load_changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(TICK_S)

    def _worker_is_back(self, capacity: Capacity) -> None:
        self._lost_at = None
        self._step_since = None
        if not self._is_draining:
            self._core.refuse_new(None)
        self._show("draining" if self._is_draining else "")
        _log.info(
            "worker opened an epoch",
            extra={
                "num_blocks": capacity.num_blocks,
                "block_size_tokens": capacity.block_size_tokens,
                "max_num_seqs": capacity.max_num_seqs,
                "max_model_len": capacity.max_model_len,
                "worker_version": capacity.version,
            },
        )
        self._notice()

    def _lose(self, error: WorkerLostError | WorkerContractError) -> None:
        """The epoch is over: its sequences wait, or fail when the worker cannot be trusted."""
        now = self._clock()
        last_step = self._core.last_planned_step
        is_contract = isinstance(error, WorkerContractError)
        if self._lost_at is None:
            self._lost_at = now
            self._show(f"no worker: {error}; last step {last_step}")
            # Before the first step it is a worker that still starts.
            level = logging.WARNING if last_step else logging.INFO
            _log.log(level, "worker lost: %s", error, extra={"last_step": last_step})
        else:
            _log.debug("worker not reached: %s", error)
        text = "the worker broke the step protocol" if is_contract else f"worker lost: {error}"
        self._core.worker_lost(
            RequestError(FailureReason.UPSTREAM_LOST, text, retry_after_ms=1000),
            now,
            can_resume=not is_contract,
        )
        self._notice()

    def _give_up(self, now: float) -> None:
        """The worker did not come back in time."""
        error = RequestError(FailureReason.UPSTREAM_LOST, "the worker is lost", retry_after_ms=1000)
        self._core.fail_all(error, now)
        if not self._is_draining:
            self._core.refuse_new(error)

    def _notice(self) -> None:
        """Something happened: wake the sender, tell the clients after it had its turn."""
        self._wake.set()
        self._flush_due.set()

    def _flush(self) -> None:
        """Hand out what gathered."""
        self._flush_due.clear()
        for outlet, delivery in self._core.take_deliveries():
            if delivery.ends and tracing.is_enabled():
                record_spans(delivery.ends, self._clock())
            sink = self._sinks.get(outlet)
            if sink is not None:
                sink(delivery)


def _cause(done: set[asyncio.Task[None]]) -> WorkerLostError | WorkerContractError:
    """Why an epoch ended; a broken contract outweighs the broken stream that follows from it."""
    errors = [task.exception() for task in done if not task.cancelled()]
    for error in sorted(errors, key=lambda e: not isinstance(e, WorkerContractError)):
        if isinstance(error, WorkerLostError | WorkerContractError):
            return error
        if error is not None:
            raise error
    raise AssertionError("an epoch ended without a cause")
