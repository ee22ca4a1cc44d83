from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.parallel.group_executor import GroupExecutor
from services.worker.parallel.progress import Progress
from services.worker.plan import Capacity, ContractError, StepPlan, StepResult
from services.worker.runner import WorldLostError
from tests.services.worker.parallel.thread_groups import make_groups, run_together
from tests.services.worker.plans import make_capacity, make_plan


class Inner:
    """Does as it is told."""

    def __init__(self, progress: Progress, digest: int = 7) -> None:
        self.progress = progress
        self.digest = digest
        self.error: Exception | None = None
        self.meeting = ""
        self.seen: list[Any] = []
        self.num_takings = 0

    @property
    def capacity(self) -> Capacity:
        return make_capacity()

    def start_epoch(self, max_plans_in_flight: int) -> None:
        self.seen.append(max_plans_in_flight)

    def num_rows_in_use(self) -> int:
        return 5

    def rows_digest(self) -> int:
        return self.digest

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        self._act()
        return StepResult(step=plan.step)

    def take_memory(self) -> None:
        self.num_takings += 1

    def finish_step(self) -> None:
        self._act()

    def _act(self) -> None:
        self.seen.append(self.progress.position())
        if self.meeting:
            self.progress.enter(self.meeting)
        if self.error is not None:
            raise self.error


class Parts:
    def __init__(self, *, checks_rows: bool = False, group: Any = None, digest: int = 7) -> None:
        progress = Progress()
        self.inner = Inner(progress, digest)
        self.failures: list[tuple[str, bool]] = []
        world: Any = SimpleNamespace(
            progress=progress,
            membership=SimpleNamespace(number=3),
            groups=SimpleNamespace(replica=group),
        )
        watch: Any = SimpleNamespace(
            fail=lambda text, is_echo: self.failures.append((text, is_echo))
        )
        self.executor = GroupExecutor(self.inner, world, watch, checks_rows=checks_rows)


def test_others_can_see_which_step_is_running() -> None:
    parts = Parts()
    parts.executor.take_memory()
    assert parts.inner.num_takings == 1
    parts.executor.start_epoch(2)
    assert parts.executor.execute(make_plan(9, {}), 0).step == 9
    parts.executor.finish_step()
    window, during, behind = parts.inner.seen
    assert (window, during.step, behind.step) == (2, 9, 9)
    assert during.seconds > 0
    assert behind.seconds > 0
    assert parts.inner.progress.position().seconds == 0
    assert parts.executor.num_rows_in_use() == 5
    assert parts.executor.capacity == make_capacity()


def test_a_refused_plan_is_the_plans_fault_alone() -> None:
    parts = Parts()
    parts.inner.error = ContractError("row 3 is named twice")
    with pytest.raises(ContractError):
        parts.executor.execute(make_plan(9, {}), 0)
    assert not parts.failures
    assert parts.inner.progress.position().seconds == 0


@pytest.mark.parametrize("call", ["execute", "finish_step"])
def test_any_other_error_ends_the_world_and_names_rank_and_step(call: str) -> None:
    parts = Parts()
    parts.executor.execute(make_plan(9, {}), 0)
    parts.inner.error = ValueError("out of ink\nand more")
    run: Any = {
        "execute": lambda: parts.executor.execute(make_plan(9, {}), 0),
        "finish_step": parts.executor.finish_step,
    }
    with pytest.raises(WorldLostError, match=r"rank 3 failed in step 9 .* ValueError: out of ink$"):
        run[call]()
    ((text, is_echo),) = parts.failures
    assert text.startswith("failed in step 9")
    assert not is_echo


def test_an_error_inside_an_exchange_is_an_echo_without_glooss_advice() -> None:
    parts = Parts()
    parts.inner.meeting = "tp.all_reduce"
    parts.inner.error = RuntimeError(
        "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:9133: Connection reset by "
        "peer. This is typically caused by a remote worker. Good luck!"
    )
    with pytest.raises(WorldLostError, match="waiting in tp"):
        parts.executor.execute(make_plan(9, {}), 0)
    ((text, is_echo),) = parts.failures
    assert is_echo
    assert text.endswith("RuntimeError: Read error [127.0.0.1]:9133: Connection reset by peer")


def test_rows_that_differ_between_ranks_end_the_world() -> None:
    groups = make_groups("replica", 3)
    parts = [
        Parts(checks_rows=True, group=groups[rank], digest=8 if rank == 2 else 7)
        for rank in range(3)
    ]

    def work(rank: int) -> str:
        try:
            parts[rank].executor.execute(make_plan(4, {}), 0)
        except WorldLostError as error:
            return str(error)
        return ""

    for text in run_together(work, 3):
        assert "rows of ranks [2] of the replica differ from the leader's" in text


def test_rows_that_are_alike_pass() -> None:
    groups = make_groups("replica", 2)
    parts = [Parts(checks_rows=True, group=group) for group in groups]

    def work(rank: int) -> int:
        result = parts[rank].executor.execute(make_plan(4, {}), 0)
        parts[rank].executor.finish_step()
        return result.step

    assert run_together(work, 2) == [4, 4]
