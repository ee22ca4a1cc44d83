"""The loop of one world: opens an epoch at each of its workers, sends plans, takes results.

A world is what steps together: one worker group, or all groups that share experts. An epoch has a
sender (wakes when there may be something to plan), a receiver and a timer; whichever stops ends it,
at every worker of the world. The core is only touched between awaits.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core import SchedulerCore
from services.scheduler.plan import (
    Capacity,
    StepPlan,
    StepResult,
    WorkerContractError,
    WorkerLostError,
)
from services.scheduler.ticks import check_world, needs_sweep, plan_step
from shared.constraint import PrepareOrder

# Steps are looked at so often.
TICK_S = 0.1
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0


class Session(Protocol):
    """An open epoch at a worker."""

    capacity: Capacity

    async def send(self, plan: StepPlan) -> None:
        """Hand a plan over."""

    async def receive(self) -> StepResult:
        """The next result."""
        ...

    async def prepare(self, order: PrepareOrder) -> int:
        """Get a constraint ready, as `preparing.Preparer`."""
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
    """Times of the loop, seconds.

    `worker_grace_s` is what sequences wait for a lost worker, `prepare_timeout_s` what a request
    waits for its constraint.
    """

    max_plans_in_flight: int = 1
    step_timeout_s: float = 60.0
    worker_grace_s: float = 1.2
    prepare_timeout_s: float = 60.0


class EpochOwner(Protocol):
    """Whom a world tells what happens to it."""

    def world_opened(self, world: "World", capacity: Capacity) -> None:
        """Its workers take plans."""

    def world_lost(self, world: "World", error: WorkerLostError | WorkerContractError) -> None:
        """Its epoch is over, or none could be opened."""

    async def before_opening(self, session: Session) -> None:
        """A worker is about to take plans: it gets ready for what lives."""

    def after_closing(self, session: Session) -> None:
        """A worker takes no more plans."""

    def note_masks(self, result: StepResult) -> None:
        """Masks were made in a step."""

    def before_result(self) -> None:
        """A result is about to reach the core."""

    def notice(self) -> None:
        """Something changed that others may act on."""


class World:
    """One epoch after the other.

    Args:
        core: The decisions.
        links: The workers.
        first: Number of the first worker's replica; the others follow.
        config: Times.
        owner: Told what happens.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        core: SchedulerCore,
        links: Sequence[WorkerLink],
        first: int,
        config: EngineConfig,
        owner: EpochOwner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no worker."""
        self.replicas = range(first, first + len(links))
        # When it was lost; None while an epoch stands or was never there.
        self.lost_at: float | None = None
        self.last_step_at: float | None = None
        self.is_open = False
        self._core = core
        self._links = links
        self._config = config
        self._owner = owner
        self._clock = clock
        self._wake = asyncio.Event()
        # Since when the oldest plan in flight is the workers' next one.
        self._step_since: float | None = None
        self._is_sweep_due = False
        # Replicas whose result of that step is still to come.
        self._silent: set[int] = set()

    @property
    def last_planned_step(self) -> int:
        """Step of the latest plan of the epoch that stands."""
        return max(self._core.last_step_at(replica) for replica in self.replicas)

    @property
    def num_in_flight(self) -> int:
        """Steps without a result; the same at all of its workers."""
        return self._core.num_in_flight_at(self.replicas[0])

    def wake(self) -> None:
        """There may be something to plan."""
        self._wake.set()

    async def run(self) -> None:
        """One epoch after the other, with a pause that grows while none makes a step."""
        backoff_s = MIN_BACKOFF_S
        while True:
            started_at = self._clock()
            error = await self._run_epoch()
            if self.last_step_at is not None and self.last_step_at >= started_at:
                backoff_s = MIN_BACKOFF_S
            self.is_open = False
            self._owner.world_lost(self, error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _run_epoch(self) -> WorkerLostError | WorkerContractError:
        """Open an epoch and serve it; returns what ended it."""
        sessions: list[Session] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            for link in self._links:
                sessions.append(await link.open(self._config.max_plans_in_flight))
            capacities = [session.capacity for session in sessions]
            check_world(capacities)
            for session in sessions:
                await self._owner.before_opening(session)
            for replica, capacity in zip(self.replicas, capacities, strict=True):
                self._core.worker_opened(capacity, self._clock(), replica)
            self._step_since = None
            self.lost_at, self.is_open = None, True
            self._owner.world_opened(self, capacities[0])
            parts = (self._send(sessions), self._receive(sessions), self._time_steps())
            tasks = [asyncio.create_task(part) for part in parts]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return _cause(done)
        except (WorkerLostError, WorkerContractError) as error:
            return error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for session in sessions:
                self._owner.after_closing(session)
                await session.close()

    async def _send(self, sessions: Sequence[Session]) -> None:
        """Plan whenever something happened, for as long as the window allows."""
        capacities = [session.capacity for session in sessions]
        first = self.replicas[0]
        while True:
            self._wake.clear()
            while (plans := self._next_plans(first, capacities)) is not None:
                if self._step_since is None:
                    self._step_since = self._clock()
                for session, plan in zip(sessions, plans, strict=True):
                    await session.send(plan)
            await self._wake.wait()

    def _next_plans(self, first: int, capacities: Sequence[Capacity]) -> list[StepPlan] | None:
        is_sweep, self._is_sweep_due = self._is_sweep_due, False
        return plan_step(self._core, first, capacities, self._clock(), is_sweep=is_sweep)

    async def _receive(self, sessions: Sequence[Session]) -> None:
        """Take results; the next plan goes out before the clients are told."""
        while True:
            results = await self._next_results(sessions)
            self._owner.before_result()
            now = self._clock()
            for replica, result in zip(self.replicas, results, strict=True):
                self._core.take_result(result, now, replica)
                if result.num_masks:
                    self._owner.note_masks(result)
            self.last_step_at = now
            self._step_since = now if self.num_in_flight else None
            self._owner.notice()

    async def _next_results(self, sessions: Sequence[Session]) -> Sequence[StepResult]:
        if len(sessions) == 1:
            return [await sessions[0].receive()]
        self._silent = set(self.replicas)

        async def receive(replica: int, session: Session) -> StepResult:
            result = await session.receive()
            self._silent.discard(replica)
            return result

        return await asyncio.gather(
            *(receive(r, session) for r, session in zip(self.replicas, sessions, strict=True))
        )

    async def _time_steps(self) -> None:
        """End the epoch when a step takes too long, or none is planned though work waits."""
        limit_s = self._config.step_timeout_s
        unplanned_since: float | None = None
        while True:
            await asyncio.sleep(min(TICK_S, limit_s / 4))
            now = self._clock()
            if self._step_since is not None and now - self._step_since > limit_s:
                step = self.last_planned_step - self.num_in_flight + 1
                whose = "".join(f" of replica {replica}" for replica in sorted(self._silent)[:1])
                raise WorkerLostError(f"step {step}{whose} has had no result for {limit_s:g} s")
            has_work = any(self._core.num_live_at(replica) for replica in self.replicas)
            if self.num_in_flight or not has_work:
                unplanned_since = None
            elif unplanned_since is None:
                unplanned_since = now
            elif now - unplanned_since > limit_s:
                raise WorkerLostError(f"work has waited {limit_s:g} s and no step was planned")
            # Not at once: the next request mostly brings a plan that says it as well.
            if needs_sweep(self._core, self.replicas):
                self._is_sweep_due = True
                self.wake()


def _cause(done: set[asyncio.Task[None]]) -> WorkerLostError | WorkerContractError:
    """Why an epoch ended; a broken contract outweighs the broken stream that follows from it."""
    errors = [task.exception() for task in done if not task.cancelled()]
    for error in sorted(errors, key=lambda e: not isinstance(e, WorkerContractError)):
        if isinstance(error, WorkerLostError | WorkerContractError):
            return error
        if error is not None:
            raise error
    raise AssertionError("an epoch ended without a cause")
