import threading
import time
from collections.abc import Iterator

import pytest

from services.worker.orders import (
    EndEpoch,
    Epoch,
    LocalOrders,
    Order,
    RunPlan,
    StartEpoch,
    Stop,
)
from services.worker.plan import ContractError, StepPlan, StepResult
from services.worker.replay import ReplayExecutor
from services.worker.runner import Runner, WorldLostError
from shared.errors import ConfigError, FailureReason
from shared.sampling import ReplayScript
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence


class Recorder(ReplayExecutor):
    def __init__(self) -> None:
        super().__init__(make_capacity())
        self.threads: set[int] = set()
        self.may_run = threading.Event()
        self.may_run.set()
        self.error: Exception | None = None
        self.finish_error: Exception | None = None
        self.num_answers_at_finish: list[int] = []
        self.results: list[StepResult] = []
        self.num_takings = 0

    def take_memory(self) -> None:
        self.num_takings += 1

    def finish_step(self) -> None:
        self.num_answers_at_finish.append(len(self.results))
        if self.finish_error is not None:
            raise self.finish_error

    def start_epoch(self, max_plans_in_flight: int) -> None:
        self.threads.add(threading.get_ident())
        super().start_epoch(max_plans_in_flight)

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        self.threads.add(threading.get_ident())
        assert self.may_run.wait(10)
        if self.error is not None:
            raise self.error
        return super().execute(plan, wait_us)


class CountedOrders(LocalOrders):
    """Tells how often the runner has begun to wait for an order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def get(self) -> Order:
        self.num_waits += 1
        return super().get()


class Bench:
    """A runner with its orders, and a place for its answers."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.orders = CountedOrders()
        self.runner = Runner(lambda: self.recorder, self.orders)
        self.results = self.recorder.results

    def open(self, epoch: Epoch) -> None:
        self.orders.put(StartEpoch(epoch=epoch, opened=lambda: None))

    def plan(self, epoch: Epoch, step: int) -> None:
        self.orders.put(RunPlan(epoch=epoch, plan=start(step), answer=self.results.append))

    def settle(self) -> None:
        """Wait until every order given so far was obeyed."""
        done = threading.Event()
        nothing = make_plan(99, {})
        mark = RunPlan(epoch=Epoch(0, 1), plan=nothing, answer=lambda _: done.set())
        self.orders.put(mark)
        assert done.wait(10)


def start(step: int) -> StepPlan:
    row = step - 1
    new = make_sequence(row, [1], script=ReplayScript(token_ids=(5,)), eos_token_ids=(9,))
    return make_plan(step, {row: Entry(blocks=(1,))}, new=[new])


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    one.runner.start()
    one.runner.ready.result(10)
    yield one
    one.recorder.may_run.set()
    one.orders.put(Stop())
    assert one.runner.join(10)


def test_building_and_every_step_happen_on_one_thread() -> None:
    built: list[int] = []

    def build() -> Recorder:
        built.append(threading.get_ident())
        return bench.recorder

    bench = Bench()
    bench.runner = Runner(build, bench.orders)
    bench.runner.start()
    epoch = Epoch(1, 1)
    bench.open(epoch)
    bench.plan(epoch, 1)
    bench.settle()
    bench.orders.put(Stop())
    assert bench.runner.join(10)
    assert bench.recorder.threads == set(built)
    assert threading.get_ident() not in built


def test_memory_is_taken_once_the_executor_is_ready(bench: Bench) -> None:
    bench.settle()
    assert bench.recorder.num_takings == 1


def test_a_failed_build_is_the_outcome_of_ready() -> None:
    def build() -> Recorder:
        raise ConfigError("too little memory")

    runner = Runner(build, LocalOrders())
    runner.start()
    assert isinstance(runner.ready.exception(10), ConfigError)
    assert runner.join(10)


def test_results_come_in_the_order_of_the_plans(bench: Bench) -> None:
    epoch = Epoch(1, 2)
    bench.open(epoch)
    for step in (1, 2, 3):
        bench.plan(epoch, step)
    bench.settle()
    assert [result.step for result in bench.results] == [1, 2, 3]


def test_waiting_plans_of_an_epoch_that_is_over_are_dropped(bench: Bench) -> None:
    epoch = Epoch(1, 2)
    bench.open(epoch)
    bench.recorder.may_run.clear()
    bench.plan(epoch, 1)
    bench.plan(epoch, 2)
    epoch.is_over = True
    bench.recorder.may_run.set()
    bench.settle()
    assert [result.step for result in bench.results] in ([], [1])


def test_the_end_of_an_old_epoch_leaves_the_rows_of_a_new_one(bench: Bench) -> None:
    old, new = Epoch(1, 1), Epoch(2, 1)
    bench.open(old)
    bench.open(new)
    bench.plan(new, 1)
    bench.orders.put(EndEpoch(epoch=old))
    bench.plan(new, 2)
    bench.settle()
    assert [result.failure for result in bench.results] == [None, None]
    assert bench.runner.num_rows_in_use() == 2
    bench.orders.put(EndEpoch(epoch=new))
    bench.settle()
    assert bench.runner.num_rows_in_use() == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ContractError("row 3 is odd"), FailureReason.INVALID_ARGUMENT),
        (RuntimeError("secret"), FailureReason.INTERNAL),
        (MemoryError(), FailureReason.INTERNAL),
    ],
)
def test_a_failed_step_ends_its_epoch_and_not_the_thread(
    bench: Bench, error: Exception, reason: FailureReason
) -> None:
    epoch = Epoch(1, 2)
    bench.open(epoch)
    bench.plan(epoch, 1)
    bench.settle()
    bench.recorder.error = error
    bench.recorder.may_run.clear()
    bench.plan(epoch, 2)
    bench.plan(epoch, 3)
    bench.recorder.may_run.set()
    other = Epoch(2, 1)
    bench.open(other)
    while len(bench.results) < 2:
        time.sleep(0.001)
    bench.recorder.error = None
    assert epoch.is_over
    bench.plan(other, 1)
    bench.settle()
    assert [result.step for result in bench.results] == [1, 2, 1]
    failure = bench.results[1].failure
    assert failure is not None
    assert failure.reason is reason
    assert "secret" not in failure.message
    assert bench.results[2].failure is None


def test_a_step_that_takes_long_is_seen_from_outside(bench: Bench) -> None:
    epoch = Epoch(1, 1)
    bench.open(epoch)
    assert bench.runner.last_step_age_s(time.monotonic()) is None
    bench.recorder.may_run.clear()
    bench.plan(epoch, 1)
    while not bench.runner.stalled_s(time.monotonic() + 60) > 50:
        time.sleep(0.001)
    bench.recorder.may_run.set()
    bench.settle()
    while bench.runner.stalled_s(time.monotonic() + 60):
        time.sleep(0.001)
    age = bench.runner.last_step_age_s(time.monotonic())
    assert age is not None
    assert 0 <= age < 10


def test_the_wait_for_a_plan_is_measured(bench: Bench) -> None:
    epoch = Epoch(1, 1)
    bench.open(epoch)
    bench.settle()
    while bench.orders.num_waits < 3:  # the answer to the second order comes before its end
        time.sleep(0.001)
    time.sleep(0.02)
    bench.plan(epoch, 1)
    bench.settle()
    assert bench.results[0].timings.wait_us >= 20_000


def test_a_step_is_finished_after_its_answer(bench: Bench) -> None:
    epoch = Epoch(1, 2)
    bench.open(epoch)
    for step in (1, 2):
        bench.plan(epoch, step)
    bench.settle()
    assert bench.recorder.num_answers_at_finish[:2] == [1, 2]


def test_a_step_that_cannot_be_finished_is_logged_and_the_thread_lives(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = Epoch(1, 1)
    bench.open(epoch)
    bench.recorder.finish_error = ZeroDivisionError("secret text")
    bench.plan(epoch, 1)
    bench.settle()
    assert "finishing a step failed" in caplog.text
    assert bench.runner.is_alive
    assert not epoch.is_over
    bench.recorder.finish_error = None
    bench.plan(epoch, 2)
    bench.settle()
    assert [result.failure for result in bench.results] == [None, None]


def test_a_lost_world_ends_the_thread_after_its_answer(bench: Bench) -> None:
    epoch = Epoch(1, 1)
    bench.open(epoch)
    bench.recorder.error = WorldLostError("rank 1 failed in step 1")
    bench.plan(epoch, 1)
    assert bench.runner.join(10)
    (result,) = bench.results
    assert result.failure is not None
    assert result.failure.reason is FailureReason.UPSTREAM_LOST
    assert result.failure.message == "rank 1 failed in step 1"
    assert bench.runner.is_lost
    # What only the next step needs is not done.
    assert not bench.recorder.num_answers_at_finish


def test_a_world_lost_between_steps_ends_the_thread(bench: Bench) -> None:
    epoch = Epoch(1, 1)
    bench.open(epoch)
    bench.recorder.finish_error = WorldLostError("rank 1 failed in step 1")
    bench.plan(epoch, 1)
    assert bench.runner.join(10)
    assert bench.runner.is_lost
    assert bench.results[0].failure is None


def test_a_source_that_is_lost_ends_the_thread() -> None:
    class Lost:
        def get(self) -> Order:
            raise WorldLostError("the exchange of orders broke")

    runner = Runner(Recorder, Lost())
    runner.start()
    assert runner.join(10)
    assert runner.is_lost
