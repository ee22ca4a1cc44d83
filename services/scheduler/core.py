"""The scheduler without its surroundings: events in, plans and deliveries out.

It has no clock, no socket and no tensor: every event carries the time, `plan` says what the worker
is to do, `take_deliveries` what the clients get.

Laws
- A submit is answered by one verdict per sequence; an admitted sequence ends exactly once, in
  whatever state it is. Its outlet is told after its last token, a closed outlet is told nothing.
- The confirmed tokens of a sequence are the truth. An epoch (`Batch`) can vanish at any time: its
  sequences wait again with their tokens, and their KV is computed anew.
- A sequence that was running at two losses is not tried again: it may be what kills the worker.
"""

import dataclasses

from services.scheduler.admission import check_fit, check_submission
from services.scheduler.batch import Batch
from services.scheduler.deadlines import Deadlines
from services.scheduler.draft_counts import add_positions
from services.scheduler.limits import CoreConfig, Limits
from services.scheduler.messages import Delivery, SequenceEnd, Submission, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, FinishCode, StepPlan, StepResult
from services.scheduler.sequence import (
    FindCachedBlocks,
    Request,
    Sequence,
    SequenceState,
    find_nothing,
)
from services.scheduler.waiting import WaitingQueue
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from shared.sampling import LoadSnapshot

# Bounds of the wait that a refused client is told, milliseconds.
MIN_RETRY_MS, MAX_RETRY_MS = 500, 30_000
MAX_LOSSES = 2

_FINISH_REASONS = {
    FinishCode.EOS: FinishReason.STOP,
    FinishCode.STOP_TOKEN: FinishReason.STOP,
    FinishCode.MAX_TOKENS: FinishReason.LENGTH,
    FinishCode.MAX_MODEL_LEN: FinishReason.LENGTH,
}


class SchedulerCore:
    """All live sequences of one worker group.

    Args:
        config: Own settings.
        find_cached_blocks: The prefix cache.
    """

    def __init__(
        self, config: CoreConfig, find_cached_blocks: FindCachedBlocks = find_nothing
    ) -> None:
        """No worker, no sequences."""
        self._config = config
        self._find_cached_blocks = find_cached_blocks
        self._limits: Limits | None = None
        self._batch: Batch | None = None
        self._waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._requests: dict[str, Request] = {}
        self._filled: dict[Outlet, None] = {}
        self._refusal: RequestError | None = None
        self._num_aborts = 0
        # Counters of the epochs that are over.
        self._past = LoadSnapshot()

    # -- clients -----------------------------------------------------------------------------

    def submit(self, submission: Submission, outlet: Outlet, now: float) -> list[Verdict]:
        """Take a request in, or refuse it as a whole; stream_ids must be free at the outlet."""
        try:
            limits = self._check_entry(submission, now)
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
            request.live.append(sequence)
            outlet.sequences[entry.stream_id] = sequence
            self._waiting.append(sequence)
            self._deadlines.add(sequence, deadline)
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

    def abort_request(self, request_id: str, now: float) -> int:
        """End every sequence of a request; returns how many were live."""
        request = self._requests.get(request_id)
        if request is None:
            return 0
        live = list(request.live)
        for sequence in live:
            self._num_aborts += 1
            self._end(sequence, now, finish_reason=FinishReason.ABORT)
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
        """End the sequences whose time is over."""
        for sequence in self._deadlines.expired(now):
            waited_ms = round((now - sequence.arrived_at) * 1000)
            error = RequestError(
                FailureReason.DEADLINE_EXCEEDED, f"the time limit is over after {waited_ms} ms"
            )
            self._end(sequence, now, failure=error)

    # -- the worker --------------------------------------------------------------------------

    def worker_opened(self, capacity: Capacity, now: float) -> None:
        """An epoch stands; what does not fit this worker fails, the rest runs again."""
        assert self._batch is None, "an epoch is open already"
        self._limits = limits = Limits.of(self._config, capacity)
        for sequence in list(self._waiting):
            sequence.last_step = 0
            try:
                check_fit(sequence.num_tokens, limits)
            except RequestError as error:
                self._end(sequence, now, failure=error)
            else:
                sequence.cut_to(limits.max_sequence_len)
        self._batch = Batch(limits, self._waiting, self, self._find_cached_blocks)

    def worker_lost(self, error: RequestError, now: float, *, can_resume: bool) -> None:
        """The epoch is over. Running sequences wait for the next one, or fail with `error`."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        self._past = _add_counters(self._past, batch)
        for sequence in reversed(list(batch.running)):
            sequence.leave(SequenceState.WAITING)
            sequence.blocks = []
            sequence.num_losses += 1
            self._waiting.push_front(sequence)
            if not can_resume or sequence.num_losses >= MAX_LOSSES:
                self._end(sequence, now, failure=error)

    def fail_all(self, error: RequestError, now: float) -> None:
        """End every live sequence."""
        for request in list(self._requests.values()):
            for sequence in list(request.live):
                self._end(sequence, now, failure=error)

    def plan(self, now: float) -> StepPlan | None:
        """The next plan, None when there is none to send now."""
        return None if self._batch is None else self._batch.plan(now)

    def take_result(self, result: StepResult, now: float) -> None:
        """A step was run."""
        assert self._batch is not None, "a result outside an epoch"
        self._batch.take_result(result, now)

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
        """The worker could not compute the sequence."""
        self._end(sequence, now, failure=error)

    def outlet_filled(self, sequence: Sequence) -> None:
        """The columns of the sequence's outlet hold tokens."""
        self._filled[sequence.outlet] = None

    # -- state -------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._waiting) + (len(self._batch.running) if self._batch else 0)

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return self._batch.num_in_flight if self._batch else 0

    @property
    def last_planned_step(self) -> int:
        """Step of the latest plan of the epoch."""
        return self._batch.last_planned_step if self._batch else 0

    def load(self) -> LoadSnapshot:
        """A snapshot for routers, metrics and operators."""
        batch, limits = self._batch, self._limits
        totals = _add_counters(self._past, batch) if batch else self._past
        return dataclasses.replace(
            totals,
            num_running=len(batch.running) if batch else 0,
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_free_blocks=batch.holdings.num_free_blocks if batch else 0,
            num_total_blocks=batch.holdings.num_total_blocks if batch else 0,
            num_aborts_total=self._num_aborts,
            is_worker_ready=batch is not None,
            max_model_len=limits.max_sequence_len if limits else 0,
        )

    def check(self) -> None:
        """Assert every law that can be seen from outside; for tests."""
        running = list(self._batch.running) if self._batch else []
        if self._batch:
            self._batch.check()
        waiting = list(self._waiting)
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

    def _check_entry(self, submission: Submission, now: float) -> Limits:
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
        head, num_waiting = self._waiting.head, len(self._waiting)
        if head is not None:
            config = self._config
            num_tokens = self._waiting.num_tokens + sum(
                len(s.prompt_token_ids) + len(s.output_token_ids) for s in submission.sequences
            )
            if num_waiting >= config.max_queued_requests or num_tokens > config.max_queued_tokens:
                waited_ms = round((now - head.arrived_at) * 1000)
                raise RequestError(
                    FailureReason.QUEUE_FULL,
                    f"{num_waiting} sequences wait, the bounds are {config.max_queued_requests} "
                    f"sequences and {config.max_queued_tokens} tokens",
                    retry_after_ms=min(max(waited_ms, MIN_RETRY_MS), MAX_RETRY_MS),
                )
        return self._limits

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
            assert self._batch is not None
            self._batch.remove(sequence, SequenceState.ENDED)
        else:
            self._waiting.remove(sequence)
            sequence.leave(SequenceState.ENDED)
        request, outlet = sequence.request, sequence.outlet
        request.live.remove(sequence)
        if not request.live:
            del self._requests[request.request_id]
        del outlet.sequences[sequence.stream_id]
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


def _add_counters(past: LoadSnapshot, batch: Batch) -> LoadSnapshot:
    """The counters of past epochs plus those of a batch."""
    return LoadSnapshot(
        num_steps_total=past.num_steps_total + batch.last_planned_step - batch.num_in_flight,
        num_prompt_tokens_total=past.num_prompt_tokens_total + batch.num_prompt_tokens,
        num_output_tokens_total=past.num_output_tokens_total + batch.num_output_tokens,
        num_preemptions_total=past.num_preemptions_total + batch.num_preemptions,
        num_drafts_total=past.num_drafts_total + batch.drafts.num_drafts,
        num_drafted_tokens_total=(past.num_drafted_tokens_total + batch.drafts.num_drafted_tokens),
        num_accepted_tokens_per_position=add_positions(
            past.num_accepted_tokens_per_position, batch.drafts.per_position
        ),
    )
