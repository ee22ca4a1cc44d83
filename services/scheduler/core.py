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
- What fits no replica that still stands ends, or ends earlier: it does not wait for a lost one.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from services.scheduler.admission import check_fit, check_submission
from services.scheduler.backlog import check_first_token, check_room
from services.scheduler.cache_events import CacheLog
from services.scheduler.deadlines import Deadlines
from services.scheduler.limits import CoreConfig, Limits
from services.scheduler.messages import Delivery, SequenceEnd, Submission, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.pace import QueuePace
from services.scheduler.plan import Capacity, FinishCode, StepPlan, StepResult
from services.scheduler.policy import Policy
from services.scheduler.replicas import Replicas
from services.scheduler.sequence import NOWHERE, Request, Sequence, SequenceState
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
        self._policy = Policy(config)
        self._replicas = Replicas(num_replicas, self._policy)
        self._pace = QueuePace()
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
            sequence.replica = self._replicas.unplaced
            request.live.append(sequence)
            outlet.sequences[entry.stream_id] = sequence
            self._policy.shares.enter(sequence.tenant_id)
            self._replicas.waiting.add(sequence, now)
            self._deadlines.add(sequence, deadline)
            if submission.first_token_timeout_ms and not entry.output_token_ids:
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
        replicas = self._replicas
        self._pace.look(now, replicas.num_started, is_waiting=bool(replicas.num_waiting))
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
        self._replicas.open(replica, Limits.of(self._config, capacity), self)
        for sequence in list(self._replicas.waiting):
            sequence.last_step = 0
            misfit = self._fit(sequence)
            if misfit is not None:
                self._end(sequence, now, failure=misfit)

    def worker_lost(
        self, error: RequestError, now: float, *, can_resume: bool, replica: int = 0
    ) -> None:
        """The epoch is over. Running sequences wait for another one, or fail with `error`."""
        ran, waited = self._replicas.close(replica)
        for sequence in waited:
            self._wait_again(sequence, now)
        for sequence in ran:
            sequence.leave(SequenceState.WAITING)
            sequence.blocks = []
            sequence.num_losses += 1
            self._policy.charge_output(sequence)
            self._wait_again(sequence, now)
            if not can_resume or sequence.num_losses >= MAX_LOSSES:
                self._end(sequence, now, failure=error)
        if self._replicas.is_standing:
            self._fit_those_left(error, now)

    def _fit_those_left(self, error: RequestError, now: float) -> None:
        """Who waits fits one of the replicas that are left, or fails with `error` and its size."""
        for sequence in list(self._replicas.waiting):
            misfit = self._fit(sequence)
            if misfit is not None:
                text = f"{error.message}; of the replicas that are left: {misfit.message}"
                failure = RequestError(error.reason, text, retry_after_ms=error.retry_after_ms)
                self._end(sequence, now, failure=failure)

    def _fit(self, sequence: Sequence) -> RequestError | None:
        """Let a sequence end where the largest replica has no more room; why it cannot run."""
        limits = self._replicas.limits
        assert limits is not None
        if sequence.total_limit > limits.max_sequence_len:
            try:
                check_fit(sequence.num_tokens, limits)
            except RequestError as error:
                return error
            sequence.cut_to(limits.max_sequence_len)
        return None

    def drain_replica(self, replica: int, now: float, *, is_draining: bool) -> None:
        """As `Placer.drain`; what leaves the replica waits for any of them."""
        for sequence in self._replicas.placer.drain(replica, is_draining=is_draining):
            self._wait_again(sequence, now)

    def _wait_again(self, sequence: Sequence, now: float) -> None:
        sequence.replica = self._replicas.unplaced
        sequence.last_step = 0
        self._replicas.waiting.add(sequence, now)

    def fail_all(self, error: RequestError, now: float) -> None:
        """End every live sequence."""
        for request in list(self._requests.values()):
            for sequence in list(request.live):
                self._end(sequence, now, failure=error)

    def plan(
        self,
        now: float,
        replica: int = 0,
        *,
        takes_prompts: bool = True,
        has_peers: bool = False,
    ) -> StepPlan | None:
        """The next plan of a replica, as `Batch.plan`; None when there is none to send now."""
        batch = self._replicas[replica].batch
        if batch is None or batch.is_full:
            return None
        if self._replicas.unplaced == NOWHERE:
            self._replicas.placer.place(replica, now)
        return batch.plan(now, takes_prompts=takes_prompts, has_peers=has_peers)

    def is_prompt_step(self, replicas: Iterable[int]) -> bool:
        """Whether the next step of replicas that step together takes prompts."""
        interval = self._config.prefill_schedule_interval
        return self._replicas.is_prompt_step(replicas, interval)

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
        return self._replicas.tidy()

    def reset_prefix_cache(self) -> int:
        """Let nobody share what was computed so far; returns how many blocks that concerns."""
        return self._replicas.clear_caches()

    @property
    def block_naming(self) -> tuple[str, int]:
        """Digest of the model and block size; empty and 0 before the first worker was reached."""
        limits = self._replicas.limits
        return (limits.model_digest, limits.block_size) if limits else ("", 0)

    @property
    def cache_log(self) -> CacheLog:
        """The changes of all prefix caches."""
        return self._replicas.cache_log

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
        return self._replicas.num_waiting + self._replicas.num_running

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
        return dataclasses.replace(self._replicas.load(), num_aborts_total=self._num_aborts)

    def check(self) -> None:
        """Assert every law that can be seen from outside; for tests."""
        found = self._replicas.check()
        live = [s for request in self._requests.values() for s in request.live]
        assert sorted(map(id, live)) == sorted(map(id, found)), "a sequence is lost"
        for sequence in live:
            assert sequence.outlet.sequences[sequence.stream_id] is sequence

    # -- inside ------------------------------------------------------------------------------

    def check_entry(self, submission: Submission, now: float) -> Limits:
        """Raise when the submission may not enter now."""
        if self._refusal is not None:
            # A new error each time: one that is raised again and again keeps every traceback.
            refusal = self._refusal
            raise RequestError(
                refusal.reason, refusal.message, retry_after_ms=refusal.retry_after_ms
            )
        limits = self._replicas.limits
        if limits is None:
            raise RequestError(
                FailureReason.UPSTREAM_LOST, "no worker has been reached yet", retry_after_ms=1000
            )
        check_submission(submission, limits)
        if submission.request_id in self._requests:
            raise RequestError(
                FailureReason.ALREADY_EXISTS,
                f"request {submission.request_id} is live",
                field="request_id",
            )
        num_tokens = sum(
            len(s.prompt_token_ids) + len(s.output_token_ids) for s in submission.sequences
        )
        backlog = self._replicas.backlog(self._pace.per_s)
        if not all(sequence.output_token_ids for sequence in submission.sequences):
            # Those that go on had their place elsewhere: they are no newcomers.
            check_room(backlog, self._config, num_tokens)
        if submission.first_token_timeout_ms:
            before = self._replicas.waiting.tokens_before(submission.tenant_id, num_tokens)
            limit_s = submission.first_token_timeout_ms / 1000
            check_first_token(backlog, limit_s, num_tokens, before)
        return limits

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
            self._replicas.queue_of(sequence).remove(sequence)
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
