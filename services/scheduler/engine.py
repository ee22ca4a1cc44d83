"""The loop around the core: clients' events in, deliveries out, clocks read.

One event loop, nothing blocks on it, and the core is only touched between awaits. Plans and results
pass through the loops of the worlds (`epochs.py`). The sequences of a world that is lost wait for
it, or go on in another; if none stands after `worker_grace_s` they fail.
"""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

from services.scheduler.cache_events import CacheUpdate
from services.scheduler.collector import Collector
from services.scheduler.core import SchedulerCore
from services.scheduler.draft_counts import DraftWatch
from services.scheduler.epochs import EngineConfig, Session, WorkerLink, World
from services.scheduler.messages import Delivery, Submission, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, StepResult, WorkerContractError, WorkerLostError
from services.scheduler.preparing import Preparations, aborted
from services.scheduler.spans import record_spans
from shared import tracing
from shared.admin import ReplicaStatus
from shared.constraint import PrepareOrder
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.sampling import LoadSnapshot

# Deadlines, grace and load snapshots are looked at so often.
TICK_S = 0.1

_log = get_logger(__name__)


class Engine:
    """Owns the core; every event of the process passes here.

    Args:
        core: The decisions.
        worlds: The workers, by worlds; replicas are numbered in this order.
        config: Times.
        show: Told why the scheduler cannot serve; empty when it can.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        core: SchedulerCore,
        worlds: Sequence[Sequence[WorkerLink]],
        config: EngineConfig,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no worker."""
        # Names this run of the scheduler.
        self.instance_id = uuid.uuid4().hex
        self._core = core
        self._config = config
        self._show = show
        self._clock = clock
        self._sinks: dict[Outlet, Callable[[Delivery], None]] = {}
        self._flush_due = asyncio.Event()
        self._is_draining = False
        self._num_masks = self._mask_us = 0
        self._preparing = Preparations(self._admit, self._tell, config.prepare_timeout_s)
        # Since when no world stands; None while one does, or none was ever looked for.
        self._lost_at: float | None = None
        self._worlds: list[World] = []
        for links in worlds:
            first = sum(len(world.replicas) for world in self._worlds)
            self._worlds.append(World(core, links, first, config, self, clock))
        self._collector = Collector()
        self._load = self._load_now()
        self._load_changed = asyncio.Event()
        self._cache_number = 0
        self._cache_changed = asyncio.Event()
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
            self._preparing.close_outlet(outlet)
            self._core.close_outlet(outlet, self._clock())
            self.notice()

    def submit(self, submission: Submission, outlet: Outlet) -> list[Verdict]:
        """Take a request in or refuse it; one verdict per sequence.

        None yet for a request whose constraint is prepared first: the sink gets them.
        """
        if submission.sampling.constraint is None:
            return self._admit(submission, outlet)
        try:
            self._core.check_entry(submission, self._clock())
            self._preparing.start(submission, outlet)
        except RequestError as error:
            return [Verdict(stream_id=s.stream_id, refusal=error) for s in submission.sequences]
        return []

    def _admit(self, submission: Submission, outlet: Outlet) -> list[Verdict]:
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
        self.notice()
        return verdicts

    def abort(
        self, outlet: Outlet, stream_id: int, reason: AbortReason, num_tokens_kept: int
    ) -> None:
        """End one sequence of a client."""
        if self._preparing.abort(outlet, stream_id, aborted()):
            return
        self._core.abort(outlet, stream_id, reason, num_tokens_kept, self._clock())
        self.notice()

    def abort_request(self, request_id: str) -> int:
        """End a request by its id; returns how many sequences were live."""
        count = self._preparing.abort_request(request_id, aborted())
        count += self._core.abort_request(request_id, self._clock())
        self.notice()
        return count

    def drain(self) -> None:
        """Refuse new requests from now on; running ones end by themselves."""
        self._is_draining = True
        self._core.refuse_new(
            RequestError(FailureReason.DRAINING, "the scheduler is draining", retry_after_ms=1000)
        )
        self._show("draining")

    def drain_replica(self, replica: int, is_draining: bool) -> int:
        """Give a replica nothing new, or undo that; returns how many sequences it has."""
        self._core.drain_replica(replica, self._clock(), is_draining=is_draining)
        num_live = self._core.num_live_at(replica)
        text = "drains" if is_draining else "takes requests"
        _log.info("replica %d %s", replica, text, extra={"num_live": num_live})
        self.notice()
        return num_live

    def fail_all(self, error: RequestError) -> None:
        """End every live sequence, and tell the clients at once."""
        self._preparing.fail_all(error)
        self._core.fail_all(error, self._clock())
        self._flush()

    async def watch_load(self) -> AsyncIterator[LoadSnapshot]:
        """The state now, then each change, at most ten per second."""
        changed = self._load_changed
        shown = self._load_now()
        yield shown
        while True:
            await changed.wait()
            changed = self._load_changed
            if self._load != shown:
                shown = self._load
                yield shown

    async def watch_cache(self, after: int | None) -> AsyncIterator[CacheUpdate]:
        """What a reader that knows the changes up to `after` is to be told, as it comes."""
        log = self._core.cache_log
        while True:
            changed = self._cache_changed
            update = log.read(after)
            if update.number != after:
                yield update
            if log.number == update.number:
                await changed.wait()
            after = update.number

    def reset_prefix_cache(self) -> int:
        """Let nobody share what was computed so far; returns how many blocks that concerns."""
        count = self._core.reset_prefix_cache()
        _log.info("prefix cache reset", extra={"num_blocks": count})
        self._tell_cache_watchers()
        return count

    # -- state -------------------------------------------------------------------------------

    @property
    def block_naming(self) -> tuple[str, int]:
        """Digest of the model and block size; empty and 0 before the first worker was reached."""
        return self._core.block_naming

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return self._core.num_live + len(self._preparing)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused for good."""
        return self._is_draining

    def last_step_age_s(self) -> float | None:
        """Seconds since the last result; None before the first."""
        latest = max((w.last_step_at for w in self._worlds if w.last_step_at), default=None)
        return None if latest is None else self._clock() - latest

    def replica_statuses(self) -> list[ReplicaStatus]:
        """What operators are told about each replica."""
        steps = [world.last_step_at for world in self._worlds for _ in world.replicas]
        now, loads = self._clock(), self._core.load().replicas
        return [
            ReplicaStatus(load=load, last_step_age_ms=int(1000 * (now - at)) if at else None)
            for load, at in zip(loads, steps, strict=True)
        ]

    # -- the loop ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled."""
        self._collector.start()
        try:
            await self._run()
        finally:
            self._collector.stop()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_time())
                tasks.create_task(self._deliver())
                for world in self._worlds:
                    tasks.create_task(world.run())
        finally:
            await self._preparing.close()

    async def _deliver(self) -> None:
        """Tell the clients whenever something gathered; a task, so that its errors are seen."""
        while True:
            await self._flush_due.wait()
            self._flush()
            await self._tidy()

    async def _tidy(self) -> None:
        """While the workers are busy do what no step has to wait for, in small pieces."""
        while self._core.tidy():
            self._tell_cache_watchers()
            await asyncio.sleep(0)
            if self._flush_due.is_set():
                return
        self._tell_cache_watchers()

    def _tell_cache_watchers(self) -> None:
        number = self._core.cache_log.number
        if number != self._cache_number:
            self._cache_number = number
            changed, self._cache_changed = self._cache_changed, asyncio.Event()
            changed.set()

    async def _keep_time(self) -> None:
        """Deadlines, the grace of a lost worker, load snapshots."""
        while True:
            now = self._clock()
            self._core.tick(now)
            if self._lost_at is not None and now - self._lost_at >= self._config.worker_grace_s:
                self._give_up(now)
            self._flush()
            self._tell_cache_watchers()
            load = self._load_now()
            if load != self._load:
                self._load = load
                self._drafts.look(load)
                changed, self._load_changed = self._load_changed, asyncio.Event()
                changed.set()
            if not self._core.num_live or self._core.num_in_flight:
                # Nothing to do, or not before the device is done.
                self._collector.rest()
            await asyncio.sleep(TICK_S)

    def _load_now(self) -> LoadSnapshot:
        model_digest, block_size_tokens = self.block_naming
        return dataclasses.replace(
            self._core.load(),
            instance_id=self.instance_id,
            is_draining=self._is_draining,
            model_digest=model_digest,
            block_size_tokens=block_size_tokens,
            num_prepared_total=self._preparing.num_prepared,
            prepare_us_total=self._preparing.prepare_us,
            num_masks_total=self._num_masks,
            mask_us_total=self._mask_us,
            gc_pause_us_total=round(self._collector.pause_s * 1e6),
            max_gc_pause_us=round(self._collector.longest_s * 1e6),
        )

    # -- what the worlds tell (epochs.EpochOwner) ------------------------------------------------

    def world_opened(self, world: World, capacity: Capacity) -> None:
        """Its workers take plans."""
        self._lost_at = None
        if not self._is_draining:
            self._core.refuse_new(None)
        self._show("draining" if self._is_draining else "")
        _log.info(
            "worker opened an epoch",
            extra={
                "replicas": list(world.replicas),
                "num_blocks": capacity.num_blocks,
                "block_size_tokens": capacity.block_size_tokens,
                "max_num_seqs": capacity.max_num_seqs,
                "max_model_len": capacity.max_model_len,
                "worker_version": capacity.version,
            },
        )
        self.notice()

    def world_lost(self, world: World, error: WorkerLostError | WorkerContractError) -> None:
        """Its epoch is over: its sequences wait, or fail when the worker cannot be trusted."""
        now = self._clock()
        last_step = world.last_planned_step
        is_contract = isinstance(error, WorkerContractError)
        if world.lost_at is None:
            world.lost_at = now
            name = self._name(world)
            # Before the first step it is a worker that still starts.
            level = logging.WARNING if last_step else logging.INFO
            _log.log(level, "%s lost: %s", name, error, extra={"last_step": last_step})
            if self._lost_at is None and not any(other.is_open for other in self._worlds):
                self._lost_at = now
                self._show(f"no worker: {error}; last step {last_step}")
        else:
            _log.debug("worker not reached: %s", error)
        text = "the worker broke the step protocol" if is_contract else f"worker lost: {error}"
        failure = RequestError(FailureReason.UPSTREAM_LOST, text, retry_after_ms=1000)
        for replica in world.replicas:
            self._core.worker_lost(failure, now, can_resume=not is_contract, replica=replica)
        self.notice()

    async def before_opening(self, session: Session) -> None:
        """Its worker gets ready for every constraint that lives; who cannot go on there ends."""
        live = [
            PrepareOrder(constraint=constraint, request_id=name, tenant_id=first.tenant_id)
            for name, request in self._core.requests.items()
            if (constraint := (first := request.live[0]).sampling.constraint) is not None
        ]
        refused = await self._preparing.add_worker(session, live)
        for request_id, error in refused.items():
            self._core.abort_request(request_id, self._clock(), failure=error)

    def after_closing(self, session: Session) -> None:
        """Nothing is prepared there any more."""
        self._preparing.remove_worker(session)

    def note_masks(self, result: StepResult) -> None:
        """What grammars cost in a step."""
        self._num_masks += result.num_masks
        self._mask_us += result.mask_us

    def before_result(self) -> None:
        """The columns of a message hold one step: stream_ids are distinct."""
        if self._flush_due.is_set():
            self._flush()

    def notice(self) -> None:
        """Something happened: wake the senders, tell the clients after they had their turn."""
        for world in self._worlds:
            world.wake()
        self._flush_due.set()

    # -- inside ------------------------------------------------------------------------------

    def _name(self, world: World) -> str:
        if len(self._worlds) == 1:
            return "worker"
        return f"worker of replica {', '.join(map(str, world.replicas))}"

    def _give_up(self, now: float) -> None:
        """The worker did not come back in time."""
        error = RequestError(
            FailureReason.UPSTREAM_LOST, "the worker is lost", retry_after_ms=1000, may_go_on=True
        )
        self._core.fail_all(error, now)
        if not self._is_draining:
            self._core.refuse_new(error)

    def _tell(self, outlet: Outlet, verdicts: list[Verdict]) -> None:
        """Verdicts that had to wait."""
        sink = self._sinks.get(outlet)
        if sink is not None and verdicts:
            sink(Delivery(tokens=None, ends=[], verdicts=verdicts))

    def _flush(self) -> None:
        """Hand out what gathered."""
        self._flush_due.clear()
        for outlet, delivery in self._core.take_deliveries():
            if delivery.ends and tracing.is_enabled():
                record_spans(delivery.ends, self._clock())
            sink = self._sinks.get(outlet)
            if sink is not None:
                sink(delivery)
