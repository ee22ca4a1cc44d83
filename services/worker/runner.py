"""The one thread that owns the device: it builds the executor, then runs orders one by one.

All torch work of the process happens here, the loading of weights included. The server's event
loop only puts orders and gets answers; it never waits for this thread.

Law: an answer follows every `RunPlan` whose epoch is not over, in order. After a failed step the
epoch is over: its rows are free and its later plans are dropped. What only the next step needs is
done after the answer, while the scheduler plans. With a lost world the thread ends.
"""

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from services.worker.orders import EndEpoch, Epoch, Order, OrderSource, RunPlan, StartEpoch, Stop
from services.worker.plan import Capacity, ContractError, StepPlan, StepResult
from shared.errors import FailureReason, RequestError
from shared.log import get_logger

_log = get_logger(__name__)


class WorldLostError(Exception):
    """A rank of the world is lost, or this one: no step can be run any more."""


class BuildStoppedError(Exception):
    """The process is to end, so the executor is not built any further."""


class StepExecutor(Protocol):
    """Runs plans: a model, or a replay of scripts."""

    @property
    def capacity(self) -> Capacity:
        """What the executor can hold."""
        ...

    def start_epoch(self, max_plans_in_flight: int) -> None:
        """Free every row."""
        ...

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        """Run one plan; ContractError if it does not fit the rows."""
        ...

    def finish_step(self) -> None:
        """Do what the next step needs and the last result does not; `execute` makes up for it."""
        ...

    def take_memory(self) -> None:
        """Start to take from the system what steps will need; called once, steps may follow."""
        ...

    def num_rows_in_use(self) -> int:
        """Rows that a scheduler holds."""
        ...


class Runner:
    """Owns the thread. Every method may be called from another one."""

    def __init__(self, build: Callable[[], StepExecutor], source: OrderSource) -> None:
        """`build` runs on the runner's thread; `ready` gets its capacity or its error."""
        self._build = build
        self._source = source
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._epoch: Epoch | None = None
        self._busy_since: float | None = None
        self._executor: StepExecutor | None = None
        self.ready: Future[Capacity] = Future()
        self._last_step_at: float | None = None
        self._is_lost = False

    def start(self) -> None:
        """Start building; steps can run once `ready` is done."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after a `Stop`; False if it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_lost(self) -> bool:
        """Whether the world was lost: the thread has ended, or will after its answer."""
        return self._is_lost

    def stalled_s(self, now: float) -> float:
        """How long the present order has been running, by `time.monotonic`; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else now - since

    def last_step_age_s(self, now: float) -> float | None:
        """Time since a step ended well; None before the first."""
        return None if self._last_step_at is None else now - self._last_step_at

    def num_rows_in_use(self) -> int:
        """Rows that a scheduler holds; a snapshot."""
        return 0 if self._executor is None else self._executor.num_rows_in_use()

    def _run(self) -> None:
        try:
            executor = self._build()
        except BaseException as error:  # noqa: BLE001  # the main loop's door: main() reports it
            self.ready.set_exception(error)
            return
        self._executor = executor
        self.ready.set_result(executor.capacity)
        executor.take_memory()
        while not self._is_lost:
            waited_from = time.perf_counter_ns()
            try:
                order = self._source.get()
            except WorldLostError:
                self._is_lost = True
                return
            if isinstance(order, Stop):
                return
            self._busy_since = time.monotonic()
            self._obey(executor, order, (time.perf_counter_ns() - waited_from) // 1000)
            self._busy_since = None

    def _obey(self, executor: StepExecutor, order: Order, wait_us: int) -> None:
        match order:
            case RunPlan(epoch=epoch, plan=plan, answer=answer):
                if not epoch.is_over:
                    answer(self._execute(executor, epoch, plan, wait_us))
                    self._finish(executor, plan)
            case StartEpoch(epoch=epoch, opened=opened):
                self._epoch = epoch
                executor.start_epoch(epoch.max_plans_in_flight)
                opened()
            case EndEpoch(epoch=epoch):
                if epoch is self._epoch:
                    executor.start_epoch(1)

    def _finish(self, executor: StepExecutor, plan: StepPlan) -> None:
        """What fails here fails again when the next plan is run, which has an answer to tell it."""
        if self._is_lost:
            return
        try:
            executor.finish_step()
        except WorldLostError:
            self._is_lost = True
        except Exception:  # noqa: BLE001  # the main loop's door: the next step tells
            _log.exception("finishing a step failed", extra={"step": plan.step})

    def _execute(
        self, executor: StepExecutor, epoch: Epoch, plan: StepPlan, wait_us: int
    ) -> StepResult:
        try:
            result = executor.execute(plan, wait_us)
        except ContractError as error:
            failure: RequestError = error
        except WorldLostError as error:
            self._is_lost = True
            failure = RequestError(FailureReason.UPSTREAM_LOST, str(error))
            return StepResult(step=plan.step, failure=failure)
        except Exception:  # noqa: BLE001  # the main loop's door: one step fails, not the process
            error_id = uuid.uuid4().hex[:12]
            _log.exception("step failed", extra={"step": plan.step, "error_id": error_id})
            failure = RequestError(FailureReason.INTERNAL, f"the step failed, error {error_id}")
        else:
            self._last_step_at = time.monotonic()
            return result
        epoch.is_over = True
        executor.start_epoch(1)
        return StepResult(step=plan.step, failure=failure)
