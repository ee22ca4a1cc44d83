"""What each rank does in tests of whole replicas: leaders run schedulers, the others follow."""

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from services.worker.graphs.recording import Recording
from services.worker.orders import Epoch, LocalOrders, RunPlan, StartEpoch, Stop
from services.worker.parallel.moe_method import MoeMethod
from services.worker.parallel.topology import Topology
from services.worker.parallel.world_rank import WorldRank
from services.worker.plan import Capacity, StepPlan, StepResult, Tick
from services.worker.runner import Runner
from services.worker.server import read_plan
from services.worker.settings import WorkerSettings
from tests.services.worker.plans import Entry, MiniScheduler, make_plan
from tests.services.worker.scheduler_client import plan_message

_PATIENCE_S = 40.0
_NUM_TICKS = 40


def make_settings(path: str, **flags: Any) -> WorkerSettings:
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 40}
    return WorkerSettings(
        address="unix:/unused", model=Path(path), num_threads=1, **(small | flags)
    )  # fmt: skip


def rank_settings(
    rank: int, rendezvous: str, path: str, topology: str, **flags: Any
) -> WorkerSettings:
    layout = Topology.parse(topology)
    size = layout.replica_size
    return make_settings(
        path,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        pp_layer_partition=",".join(map(str, layout.layer_partition)) or None,
        data_parallel_size=layout.data_parallel_size,
        data_parallel_rank=rank // size,
        enable_expert_parallel=layout.enable_expert_parallel,
        rank=rank % size,
        rendezvous=rendezvous,
        check_rows=True,
        **flags,
    )


class Replica:
    """The executor of a replica as its leader's scheduler sees it: orders in, results out."""

    def __init__(self, runner: Runner, orders: LocalOrders) -> None:
        self.capacity: Capacity = runner.ready.result(_PATIENCE_S)
        self._orders = orders
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self.make_tick: Callable[[StepPlan], Tick | None] = lambda plan: None
        self.last: StepResult | None = None
        self._epoch = Epoch(0, 1)
        self.open_epoch()

    def open_epoch(self) -> None:
        opened = threading.Event()
        self._epoch = Epoch(self._epoch.number + 1, 1)
        self._orders.put(StartEpoch(epoch=self._epoch, opened=opened.set))
        assert opened.wait(_PATIENCE_S)

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        plan = replace(plan, tick=self.make_tick(plan))
        encode = plan_message(plan).plan.SerializeToString
        self._orders.put(
            RunPlan(epoch=self._epoch, plan=plan, answer=self._results.put, encode=encode)
        )
        self.last = None
        self.last = self._results.get(timeout=_PATIENCE_S)
        return self.last


def run_ranks(
    rank: int,
    rendezvous: str,
    path: str,
    topology: str,
    jobs: list[list[dict[str, Any]]],
    bad_replica: int | None = None,
    captured_from: int | None = None,
    **flags: Any,
) -> Any:
    """Each replica runs its jobs; its leader returns what became of them.

    A bad replica sends a refused plan, then plans without rows. From step `captured_from` on,
    when no prompt is left, ticks ask for captured steps.
    """
    if captured_from is not None:
        return _counting_captured(rank, rendezvous, path, topology, jobs, captured_from, **flags)
    settings = rank_settings(rank, rendezvous, path, topology, **flags)
    world, runner, orders = start(settings)
    found: Any = None
    if settings.is_leader:
        replica = Replica(runner, orders)
        if settings.data_parallel_rank == bad_replica:
            set_tick(replica, settings)
            found = run_rejected(replica)
            orders.put(Stop())
            assert runner.join(_PATIENCE_S)
            world.leave()
            return found
        if settings.topology.is_joint:
            found = run_in_ticks(replica, settings, jobs)
        else:
            found = run_jobs(replica, jobs[settings.data_parallel_rank])
        orders.put(Stop())
    assert runner.join(_PATIENCE_S)
    assert not world.verdict, world.verdict
    runner.ready.result(0)
    world.leave()
    return found


def _counting_captured(
    rank: int,
    rendezvous: str,
    path: str,
    topology: str,
    jobs: list[list[dict[str, Any]]],
    captured_from: int,
    **flags: Any,
) -> Any:
    """Replicas in ticks, whose steps of all ranks are captured ones from a step on."""
    settings = rank_settings(rank, rendezvous, path, topology, **flags)
    run, num_runs = Recording.run, []

    def counted(recording: Recording) -> None:
        num_runs.append(1)
        run(recording)

    found: Any = None
    with mock.patch.object(Recording, "run", counted):
        world, runner, orders = start(settings)
        if settings.is_leader:
            replica = Replica(runner, orders)
            found = run_in_ticks(replica, settings, jobs, captured_from)
            orders.put(Stop())
        assert runner.join(_PATIENCE_S)
    assert not world.verdict, world.verdict
    world.leave()
    # Dummy steps among them: a replica without rows takes the captured step too. Each size (1, 2,
    # 4, 8 sequences, and 6 where they have drafts) is run once when it is captured.
    num_sizes = 5 if settings.num_speculative_tokens else 4
    assert len(num_runs) == num_sizes + _NUM_TICKS - captured_from + 1
    return found


def run_recorded(
    rank: int, rendezvous: str, path: str, topology: str, jobs: list[dict[str, Any]], **flags: Any
) -> tuple[list[dict[str, Any]], int]:
    """One replica runs its jobs; each rank returns how many steps were done from recordings too."""
    settings = rank_settings(rank, rendezvous, path, topology, **flags)
    run, num_runs = Recording.run, []

    def counted(recording: Recording) -> None:
        num_runs.append(1)
        run(recording)

    found: list[dict[str, Any]] = []
    with mock.patch.object(Recording, "run", counted):
        world, runner, orders = start(settings)
        if settings.is_leader:
            found = run_jobs(Replica(runner, orders), jobs)
            orders.put(Stop())
        assert runner.join(_PATIENCE_S)
    assert not world.verdict, world.verdict
    world.leave()
    return found, len(num_runs)


def start(settings: WorkerSettings) -> tuple[WorldRank, Runner, LocalOrders]:
    world, orders = WorldRank(settings), LocalOrders()
    source = world.lead(orders) if settings.is_leader else world.follow(read_plan)
    runner = Runner(lambda: world.build(lambda: False), source)
    runner.start()
    return world, runner, orders


def run_jobs(executor: Any, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    scheduler = MiniScheduler(executor, chunk=24)
    lives = [scheduler.add(**job) for job in jobs]
    scheduler.run()
    return describe(scheduler, lives)


def describe(scheduler: MiniScheduler, lives: list[Any]) -> list[dict[str, Any]]:
    return [
        {"outputs": one.outputs, "code": one.code, "error": one.error and one.error.message}
        | {"drafted": one.drafted}
        for one in lives
    ] + [[columns for columns in scheduler.logprobs if columns is not None]]


def run_in_ticks(
    replica: Replica,
    settings: WorkerSettings,
    jobs: list[list[dict[str, Any]]],
    captured_from: int | None = None,
) -> list[dict[str, Any]]:
    """As many ticks on every replica, with numbers that hold for all: large enough ones here.

    A scheduler would know the plans of all replicas; these schedulers only know their own.
    """
    set_tick(replica, settings, captured_from)
    scheduler = MiniScheduler(replica, chunk=12)
    lives = [scheduler.add(**job) for job in jobs[settings.data_parallel_rank]]
    for _ in range(_NUM_TICKS):
        if scheduler.live:
            scheduler.run_step()
        else:
            scheduler.step += 1
            freed, scheduler._freed = scheduler._freed, []
            result = replica.execute(make_plan(scheduler.step, {}, freed=freed), 0)
            assert result.failure is None, result.failure
    assert not scheduler.live
    return describe(scheduler, lives)


def set_tick(replica: Replica, settings: WorkerSettings, captured_from: int | None = None) -> None:
    num_drafts = settings.num_speculative_tokens
    most = 24 + 8 * (1 + num_drafts)
    ladder = replica.capacity.moe_ladder
    method = next(method for bound, method in ladder if most <= bound)
    tick = Tick(
        num_tokens=most,
        method=MoeMethod(method),
        num_draft_passes=num_drafts,
        num_draft_rows=8 if num_drafts else 0,
    )
    replica.make_tick = lambda plan: tick
    if captured_from is None:
        return
    assert replica.capacity.captured_num_seqs[-1] == 8
    captured = replace(tick, num_tokens=8 * (1 + num_drafts), captured_num_seqs=8)
    replica.make_tick = lambda plan: tick if plan.step < captured_from else captured


def run_rejected(replica: Replica) -> list[str]:
    """What each tick of the bad replica was answered, where it was not a result."""
    failures = []
    step = 0
    for tick in range(_NUM_TICKS):
        step += 1
        entries = {3: Entry(blocks=(5,))} if tick == 4 else {}
        result = replica.execute(make_plan(step, entries), 0)
        if result.failure is not None:
            failures.append(result.failure.message)
            replica.open_epoch()
            step = 0
    return failures
