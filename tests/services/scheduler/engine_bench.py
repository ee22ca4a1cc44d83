"""An engine with workers in memory, for the tests of its loops."""

import asyncio
import time
from collections.abc import Callable

from services.scheduler.core import SchedulerCore
from services.scheduler.engine import Engine
from services.scheduler.epochs import EngineConfig
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import Delivery, SequenceEnd
from services.scheduler.outlet import Outlet
from services.scheduler.plan import (
    Capacity,
    StepPlan,
    StepResult,
    WorkerLostError,
)
from shared.errors import RequestError
from tests.services.scheduler.builders import capacity, entry, submission
from tests.services.scheduler.simulated_worker import SimulatedWorker


class StillClock:
    """Stands still unless a test sets it: a machine that is slow makes nothing late."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # states come from many places
            await asyncio.sleep(0.005)


class Link:
    """A worker in memory. `is_up` and `gate` are what a test does to it."""

    def __init__(self, limits: Capacity | None = None) -> None:
        self.limits = limits or capacity()
        self.is_up = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_opened = 0
        self.sessions: list[Session] = []
        self.twist: Callable[[StepResult], None] = lambda _: None

    async def open(self, max_plans_in_flight: int) -> "Session":
        if not self.is_up:
            raise WorkerLostError("nobody there")
        self.num_opened += 1
        self.sessions.append(Session(self, self.limits))
        return self.sessions[-1]

    def kill(self) -> None:
        self.is_up = False
        self.sessions[-1].broken.set()


class Session:
    def __init__(self, link: Link, limits: Capacity) -> None:
        self.link = link
        self.capacity = limits
        self.worker = SimulatedWorker(limits)
        self.plans: asyncio.Queue[StepPlan] = asyncio.Queue()
        self.broken = asyncio.Event()
        self.is_closed = False
        self.max_in_flight = 0

    async def send(self, plan: StepPlan) -> None:
        self.plans.put_nowait(plan)
        self.max_in_flight = max(self.max_in_flight, self.plans.qsize())

    async def receive(self) -> StepResult:
        broken = asyncio.create_task(self.broken.wait())
        working = asyncio.create_task(self._work())
        done, waiting = await asyncio.wait({broken, working}, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if broken in done:
            raise WorkerLostError("the stream broke")
        return working.result()

    async def _work(self) -> StepResult:
        plan = await self.plans.get()
        await self.link.gate.wait()
        result = self.worker.run(plan)
        self.link.twist(result)
        return result

    async def close(self) -> None:
        self.is_closed = True


class Client:
    """One outlet and what it got."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, SequenceEnd] = {}
        self.changed = asyncio.Event()
        self.outlet: Outlet = engine.open_outlet(self._take)

    def submit(self, stream_id: int, **changes: object) -> RequestError | None:
        self.tokens[stream_id] = []
        (verdict,) = self.engine.submit(
            submission(entry(stream_id=stream_id), request_id=f"r{stream_id}", **changes),
            self.outlet,
        )
        return verdict.refusal

    def _take(self, delivery: Delivery) -> None:
        if delivery.tokens:
            start = 0
            for stream_id, count in zip(
                delivery.tokens.stream_ids, delivery.tokens.num_tokens, strict=True
            ):
                self.tokens[stream_id] += delivery.tokens.token_ids[start : start + count]
                start += count
        for end in delivery.ends:
            self.ends[end.stream_id] = end
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Bench:
    """An engine that runs as long as the `with` block.

    Several links are replicas of their own, or one world if they are joint.
    """

    def __init__(
        self,
        *,
        window: int = 1,
        step_timeout_s: float = 5.0,
        grace_s: float = 0.3,
        links: list[Link] | None = None,
        is_joint: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links = links or [Link()]
        self.link = self.links[0]
        self.reasons: list[str] = []
        self.told = asyncio.Event()
        self.core = SchedulerCore(
            CoreConfig(max_plans_in_flight=window), num_replicas=len(self.links)
        )
        worlds = [self.links] if is_joint else [[link] for link in self.links]
        config = EngineConfig(
            max_plans_in_flight=window, step_timeout_s=step_timeout_s, worker_grace_s=grace_s
        )
        self.engine = Engine(self.core, worlds, config, self._show, clock)

    async def __aenter__(self) -> "Bench":
        self.task = asyncio.create_task(self.engine.run())
        if self.link.is_up:
            await self.until_reason(lambda reason: not reason)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.core.check()

    async def until_reason(self, condition: Callable[[str], object]) -> None:
        async with asyncio.timeout(30):
            while not self.reasons or not condition(self.reasons[-1]):
                self.told.clear()
                await self.told.wait()

    def _show(self, reason: str) -> None:
        self.reasons.append(reason)
        self.told.set()

    def client(self) -> Client:
        return Client(self.engine)
