"""The scheduler without its surroundings: events in, plans and deliveries out.

It has no clock, no socket and no tensor: every event carries the time, `plan` says what the worker
is to do, `take_deliveries` what the clients get.

Laws
- A submit is answered by one verdict per sequence; an admitted sequence ends exactly once, in
  whatever state it is. Its outlet is told after its last token, a closed outlet is told nothing.
- The confirmed tokens of a sequence are the truth. An epoch (`Batch`) can vanish at any time: its
  sequences wait again with their tokens, and their KV is computed anew, by whichever replica has
  room for them first.
- A sequence that was running at two losses is not tried again: it may be what kills the worker.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from services.scheduler.admission import check_fit, check_submission
from services.scheduler.backlog import Backlog, check_first_token, check_room
from services.scheduler.batch import Batch
from services.scheduler.cache_events import CachedBlock, CacheLog
from services.scheduler.deadlines import Deadlines
from services.scheduler.holders import Holders
from services.scheduler.limits import CoreConfig, Limits
from services.scheduler.messages import Delivery, SequenceEnd, Submission, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.pace import QueuePace
from services.scheduler.placer import Placer
from services.scheduler.plan import Capacity, FinishCode, StepPlan, StepResult
from services.scheduler.policy import Policy
from services.scheduler.prefix_cache import PrefixCache
from services.scheduler.replica import Replica, add_counters, check_alike
from services.scheduler.sequence import NOWHERE, Request, Sequence, SequenceState
from services.scheduler.waiting import WaitingQueue
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from shared.sampling import LoadSnapshot

MAX_LOSSES = 2

_FINISH_REASONS = {
    FinishCode.EOS: FinishReason.STOP,
    FinishCode.STOP_TOKEN: FinishReason.STOP,
    FinishCode.MAX_TOKENS: FinishReason.LENGTH,
    FinishCode.MAX_MODEL_LEN: FinishReason.LENGTH,
}


class SchedulerCore:
    """All live sequences of one model's replicas.

    Args:
        config: Own settings.
        num_replicas: Worker groups; events of each carry its number.
    """

    def __init__(self, config: CoreConfig, num_replicas: int = 1) -> None:
        """No worker, no sequences."""
        self._config = config
        self._limits: Limits | None = None
        self._policy = Policy(config)
        self._waiting = WaitingQueue(self._policy)
        is_single = num_replicas == 1
        holders = None if is_single else Holders()
        self.cache_log = CacheLog(self._named_blocks, holders=holders)
        self._replicas = [
            Replica(self._waiting if is_single else WaitingQueue(self._policy))
            for _ in range(num_replicas)
        ]
        self._placer = Placer(self._waiting, self._replicas, holders)
        self._pace = QueuePace()
        # A single replica has nothing to choose: all that waits is placed.
        self._unplaced = 0 if is_single else NOWHERE
        self._deadlines = Deadlines()
        self._requests: dict[str, Request] = {}
        self._filled: dict[Outlet, None] = {}
        self._refusal: RequestError | None = None
        self._num_aborts = 0

    # -- clients -----------------------------------------------------------------------------

    def submit(self, submission: Submission, outlet: Outlet, now: float) -> list[Verdict]:
        """Take a request in, or refuse it as a whole; stream_ids must be free at the outlet."""
        try:
            limits = self.check_entry(submission, now)
        except RequestError as error:
            return [Verdict(stream_id=s.stream_id, refusal=error) for s in submission.sequences]
        request = Request(submission)
        self._requests[submission.request_id] = request
        timeout_s = submission.timeout_ms / 1000 or self._config.max_timeout_s
        deadline = now + min(timeout_s, self._config.max_timeout_s)
        for entry in submission.sequences:
            assert entry.stream_id not in outlet.sequences, "the door lets no live stream_id in"
            sampling = dataclasses.replace(submission.sampling, seed=entry.seed)
            sequence = Sequence(request, outlet, entry, sampling, now)
            sequence.cut_to(limits.max_sequence_len)
            sequence.replica = self._unplaced
            request.live.append(sequence)
            outlet.sequences[entry.stream_id] = sequence
            self._policy.shares.enter(sequence.tenant_id)
            self._waiting.add(sequence, now)
            self._deadlines.add(sequence, deadline)
            if submission.first_token_timeout_ms:
                self._deadlines.add_first_token(
                    sequence, now + submission.first_token_timeout_ms / 1000
                )
        return [Verdict(stream_id=s.stream_id) for s in submission.sequences]

    def abort(
        self, outlet: Outlet, stream_id: int, reason: AbortReason, num_tokens_kept: int, now: float
    ) -> None:
        """End one sequence of an outlet; an unknown or ended one is no error."""
        sequence = outlet.sequences.get(stream_id)
        if sequence is None:
            return
        if reason is AbortReason.STOP_STRING:
            kept = min(num_tokens_kept, len(sequence.output_token_ids))
            self._end(sequence, now, finish_reason=FinishReason.STOP, num_output_tokens=kept)
        elif reason is AbortReason.SLOW_READER:
            self._num_aborts += 1
            error = RequestError(FailureReason.SLOW_READER, "the reader did not take its output")
            self._end(sequence, now, failure=error)
        else:
            self._num_aborts += 1
            self._end(sequence, now, finish_reason=FinishReason.ABORT)

    def abort_request(
        self, request_id: str, now: float, failure: RequestError | None = None
    ) -> int:
        """End every sequence of a request, badly with a failure; returns how many were live."""
        request = self._requests.get(request_id)
        if request is None:
            return 0
        live = list(request.live)
        for sequence in live:
            self._num_aborts += failure is None
            reason = FinishReason.ABORT if failure is None else None
            self._end(sequence, now, finish_reason=reason, failure=failure)
        return len(live)

    def close_outlet(self, outlet: Outlet, now: float) -> None:
        """The client is gone: its sequences end, nobody is told."""
        outlet.is_closed = True
        for sequence in list(outlet.sequences.values()):
            self._num_aborts += 1
            self._end(sequence, now, finish_reason=FinishReason.ABORT)
        outlet.take()
        self._filled.pop(outlet, None)

    def refuse_new(self, error: RequestError | None) -> None:
        """Refuse every submit with `error` from now on; None takes submits again."""
        self._refusal = error

    def take_deliveries(self) -> list[tuple[Outlet, Delivery]]:
        """What gathered for the clients since the last call."""
        filled, self._filled = self._filled, {}
        deliveries = [(outlet, outlet.take()) for outlet in filled]
        return [(outlet, delivery) for outlet, delivery in deliveries if delivery is not None]

    # -- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End the sequences whose time is over, look at how fast the queue gets shorter."""
        num_started = sum(replica.clock.num_started for replica in self._replicas)
        self._pace.look(now, num_started, is_waiting=bool(self._num_waiting))
        for sequence, is_first_late in self._deadlines.expired(now):
            waited_ms = round((now - sequence.arrived_at) * 1000)
            text = f"the time limit is over after {waited_ms} ms"
            if is_first_late:
                text = f"no first token within {waited_ms} ms"
            error = RequestError(
                FailureReason.DEADLINE_EXCEEDED,
                text,
                field="first_token_timeout_ms" if is_first_late else None,
            )
            self._end(sequence, now, failure=error)

    # -- the worker --------------------------------------------------------------------------

    def worker_opened(self, capacity: Capacity, now: float, replica: int = 0) -> None:
        """An epoch stands; what does not fit this worker fails, the rest runs again.

        Raises:
            WorkerContractError: It is not like the replicas whose sequences it may get.
        """
        opened = self._replicas[replica]
        assert opened.batch is None, "an epoch is open already"
        limits = Limits.of(self._config, capacity)
        check_alike(limits, self._replicas)
        self._limits = opened.limits = limits
        for sequence in list(self._waiting):
            sequence.last_step = 0
            try:
                check_fit(sequence.num_tokens, limits)
            except RequestError as error:
                self._end(sequence, now, failure=error)
            else:
                sequence.cut_to(limits.max_sequence_len)
        cache = PrefixCache(limits, self.cache_log, replica)
        opened.batch = Batch(limits, opened.waiting, self, cache, opened.clock)

    def worker_lost(
        self, error: RequestError, now: float, *, can_resume: bool, replica: int = 0
    ) -> None:
        """The epoch is over. Running sequences wait for the next one, or fail with `error`."""
        lost = self._replicas[replica]
        ran = lost.close()
        if lost.waiting is not self._waiting:
            for sequence in list(lost.waiting):
                lost.waiting.remove(sequence)
                self._wait_again(sequence, now)
        for sequence in ran:
            sequence.leave(SequenceState.WAITING)
            sequence.blocks = []
            sequence.num_losses += 1
            self._policy.charge_output(sequence)
            self._wait_again(sequence, now)
            if not can_resume or sequence.num_losses >= MAX_LOSSES:
                self._end(sequence, now, failure=error)

    def drain_replica(self, replica: int, now: float, *, is_draining: bool) -> None:
        """As `Placer.drain`; what leaves the replica waits for any of them."""
        for sequence in self._placer.drain(replica, is_draining=is_draining):
            self._wait_again(sequence, now)

    def _wait_again(self, sequence: Sequence, now: float) -> None:
        sequence.replica = self._unplaced
        sequence.last_step = 0
        self._waiting.add(sequence, now)

    def fail_all(self, error: RequestError, now: float) -> None:
        """End every live sequence."""
        for request in list(self._requests.values()):
            for sequence in list(request.live):
                self._end(sequence, now, failure=error)

    def plan(self, now: float, replica: int = 0, *, takes_prompts: bool = True) -> StepPlan | None:
        """The next plan of a replica, None when there is none to send now."""
        batch = self._replicas[replica].batch
        if batch is None:
            return None
        if self._unplaced == NOWHERE:
            self._placer.place(replica, now)
        return batch.plan(now, takes_prompts=takes_prompts)

    def is_prompt_step(self, replicas: Iterable[int]) -> bool:
        """Whether the next step of replicas that step together takes prompts.

        All take them in the same steps, every `prefill_schedule_interval`th: a prompt makes a step
        a long one for all replicas. Nobody waits where none decodes, or all have prompts.
        """
        batches = [b for r in replicas if (b := self._replicas[r].batch) is not None]
        step = max(batch.last_planned_step for batch in batches) + 1
        return (
            step % self._config.prefill_schedule_interval == 0
            or not any(batch.decodes for batch in batches)
            or all(batch.has_prompts for batch in batches)
        )

    def plan_nothing(self, replica: int) -> StepPlan:
        """A plan without rows, for a replica whose world makes a step; its window has room."""
        batch = self._replicas[replica].batch
        assert batch is not None, "a plan outside an epoch"
        return batch.plan_nothing()

    def take_result(self, result: StepResult, now: float, replica: int = 0) -> None:
        """A step was run."""
        batch = self._replicas[replica].batch
        assert batch is not None, "a result outside an epoch"
        batch.take_result(result, now)

    # -- the prefix caches -------------------------------------------------------------------

    def tidy(self) -> bool:
        """Do what no step has to wait for; whether there is more of it to do."""
        return any([replica.batch.tidy() for replica in self._replicas if replica.batch])

    def reset_prefix_cache(self) -> int:
        """Let nobody share what was computed so far; returns how many blocks that concerns."""
        return sum(replica.batch.clear_cache() for replica in self._replicas if replica.batch)

    @property
    def block_naming(self) -> tuple[str, int]:
        """Digest of the model and block size; empty and 0 before the first worker was reached."""
        return (self._limits.model_digest, self._limits.block_size) if self._limits else ("", 0)

    def _named_blocks(self) -> list[CachedBlock]:
        batches = [replica.batch for replica in self._replicas if replica.batch]
        return [block for batch in batches for block in batch.cache.named_blocks()]

    # -- what the batch tells (results.BatchOwner) ---------------------------------------------

    def sequence_finished(self, sequence: Sequence, code: FinishCode, now: float) -> None:
        """The worker ended the sequence."""
        last = sequence.output_token_ids[-1]
        primary_eos = sequence.sampling.eos_token_ids[:1]
        is_stop = _FINISH_REASONS[code] is FinishReason.STOP
        self._end(
            sequence,
            now,
            finish_reason=_FINISH_REASONS[code],
            stop_token_id=last if is_stop and (last,) != primary_eos else None,
        )

    def sequence_failed(self, sequence: Sequence, error: RequestError, now: float) -> None:
        """The worker could not compute the sequence: nobody may share what it computed."""
        if sequence.state is SequenceState.RUNNING:
            batch = self._replicas[sequence.replica].batch
            assert batch is not None
            batch.cache.distrust(sequence)
        self._end(sequence, now, failure=error)

    def outlet_filled(self, sequence: Sequence) -> None:
        """The columns of the sequence's outlet hold tokens."""
        self._filled[sequence.outlet] = None

    # -- state -------------------------------------------------------------------------------

    @property
    def requests(self) -> Mapping[str, Request]:
        """Those with live sequences."""
        return self._requests

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return self._num_waiting + sum(len(r.batch.running) for r in self._replicas if r.batch)

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return sum(r.batch.num_in_flight for r in self._replicas if r.batch)

    @property
    def last_planned_step(self) -> int:
        """Step of the latest plan of the epochs that stand."""
        return max((r.batch.last_planned_step for r in self._replicas if r.batch), default=0)

    def num_in_flight_at(self, replica: int) -> int:
        """Plans of a replica without a result."""
        batch = self._replicas[replica].batch
        return batch.num_in_flight if batch else 0

    def last_step_at(self, replica: int) -> int:
        """Step of the latest plan of a replica's epoch."""
        batch = self._replicas[replica].batch
        return batch.last_planned_step if batch else 0

    def num_live_at(self, replica: int) -> int:
        """Sequences that run at a replica, or could."""
        found = self._replicas[replica]
        return len(found.waiting) + (len(found.batch.running) if found.batch else 0)

    def is_left_over_at(self, replica: int) -> bool:
        """Whether a worker still holds rows that ended, and no plan comes that would say so."""
        batch = self._replicas[replica].batch
        return batch is not None and batch.is_left_over

    def load(self) -> LoadSnapshot:
        """A snapshot for routers, metrics and operators."""
        totals = self._replicas[0].counters()
        for replica in self._replicas[1:]:
            totals = add_counters(totals, replica.counters())
        return dataclasses.replace(
            totals,
            num_waiting=self._num_waiting,
            num_waiting_tokens=self._num_waiting_tokens,
            num_aborts_total=self._num_aborts,
            max_model_len=self._limits.max_sequence_len if self._limits else 0,
            replicas=tuple(replica.load() for replica in self._replicas),
        )

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._placed_queues()))

    @property
    def _num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens + sum(q.num_tokens for q in self._placed_queues())

    def _placed_queues(self) -> list[WaitingQueue]:
        """Queues of replicas beside the common one."""
        return [r.waiting for r in self._replicas if r.waiting is not self._waiting]

    def check(self) -> None:
        """Assert every law that can be seen from outside; for tests."""
        running: list[Sequence] = []
        waiting = list(self._waiting)
        assert all(sequence.replica == self._unplaced for sequence in waiting)
        for number, replica in enumerate(self._replicas):
            own = list(replica.waiting)
            if replica.batch:
                replica.batch.check()
                own += replica.batch.running
                running += replica.batch.running
            assert all(sequence.replica == number for sequence in own), "a sequence is elsewhere"
        waiting += [sequence for queue in self._placed_queues() for sequence in queue]
        assert not set(running) & set(waiting), "a sequence runs and waits"
        live = [s for request in self._requests.values() for s in request.live]
        assert sorted(map(id, live)) == sorted(map(id, running + waiting)), "a sequence is lost"
        for sequence in live:
            assert sequence.outlet.sequences[sequence.stream_id] is sequence
        for sequence in waiting:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.blocks, "a waiting sequence holds blocks"
            assert sequence.row < 0, "a waiting sequence holds a row"

    # -- inside ------------------------------------------------------------------------------

    def check_entry(self, submission: Submission, now: float) -> Limits:
        """Raise when the submission may not enter now."""
        if self._refusal is not None:
            # A new error each time: one that is raised again and again keeps every traceback.
            refusal = self._refusal
            raise RequestError(
                refusal.reason, refusal.message, retry_after_ms=refusal.retry_after_ms
            )
        if self._limits is None:
            raise RequestError(
                FailureReason.UPSTREAM_LOST, "no worker has been reached yet", retry_after_ms=1000
            )
        check_submission(submission, self._limits)
        if submission.request_id in self._requests:
            raise RequestError(
                FailureReason.ALREADY_EXISTS,
                f"request {submission.request_id} is live",
                field="request_id",
            )
        num_tokens = sum(
            len(s.prompt_token_ids) + len(s.output_token_ids) for s in submission.sequences
        )
        backlog = self._backlog()
        check_room(backlog, self._config, num_tokens)
        if submission.first_token_timeout_ms:
            before = self._waiting.tokens_before(submission.tenant_id, num_tokens)
            limit_s = submission.first_token_timeout_ms / 1000
            check_first_token(backlog, limit_s, num_tokens, before)
        return self._limits

    def _backlog(self) -> Backlog:
        open_ones = [(r, r.batch) for r in self._replicas if r.batch]
        return Backlog(
            num_sequences=self._num_waiting,
            num_tokens=self._num_waiting_tokens,
            num_catch_up_tokens=sum(batch.num_catch_up_tokens for _, batch in open_ones),
            sequences_per_s=self._pace.per_s,
            prompt_tokens_per_s=sum(r.clock.prompt_tokens_per_s for r, _ in open_ones),
        )

    def _end(
        self,
        sequence: Sequence,
        now: float,
        *,
        finish_reason: FinishReason | None = None,
        failure: RequestError | None = None,
        stop_token_id: int | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """The one place where a sequence ends."""
        assert sequence.state is not SequenceState.ENDED, "a sequence ends twice"
        if sequence.state is SequenceState.RUNNING:
            batch = self._replicas[sequence.replica].batch
            assert batch is not None
            batch.remove(sequence, SequenceState.ENDED)
        else:
            is_placed = sequence.replica != self._unplaced
            queue = self._replicas[sequence.replica].waiting if is_placed else self._waiting
            queue.remove(sequence)
            sequence.leave(SequenceState.ENDED)
        request, outlet = sequence.request, sequence.outlet
        request.live.remove(sequence)
        if not request.live:
            del self._requests[request.request_id]
        del outlet.sequences[sequence.stream_id]
        self._policy.shares.leave(sequence.tenant_id)
        self._deadlines.ended()
        if num_output_tokens is None:
            num_output_tokens = len(sequence.output_token_ids)
        if not outlet.is_closed:
            self._filled[outlet] = None
        outlet.ends.append(
            SequenceEnd(
                stream_id=sequence.stream_id,
                finish_reason=finish_reason,
                failure=failure,
                stop_token_id=stop_token_id,
                stats=sequence.stats(now, num_output_tokens),
                timeline=sequence.timeline(now),
            )
        )
