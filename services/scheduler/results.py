"""A worker's result, held against its plan and handed to the sequences that the plan recorded.

The loop over the rows has a short lane for the usual row (a running sequence without extras, one
token, no end) and one function for everything else; a worker with drafts has a loop of its own,
whose short lane takes runs. Neither asks who owns a row by now.
"""

from array import array
from collections.abc import Sequence as ListOf
from itertools import islice
from typing import Final, Protocol

from services.scheduler.limits import Limits
from services.scheduler.plan import FinishCode, StepPlan, StepResult, WorkerContractError
from services.scheduler.sequence import Sequence, SequenceState
from shared.errors import RequestError
from shared.sampling import TokenLogprobs

_LAST_CODE: Final = max(FinishCode)


class BatchOwner(Protocol):
    """What the results mean for the owner of the sequences; it removes them from the batch."""

    def sequence_finished(self, sequence: Sequence, code: FinishCode, now: float) -> None:
        """The worker ended the sequence."""

    def sequence_failed(self, sequence: Sequence, error: RequestError, now: float) -> None:
        """The worker could not compute the sequence."""

    def outlet_filled(self, sequence: Sequence) -> None:
        """The columns of the sequence's outlet hold tokens."""


# A sequence, its admission, and how many of its first tokens are computed with a result.
Filled = tuple[Sequence, int, int]


class PlanRecord:
    """A plan in flight, whom it names, and what its result makes of full blocks."""

    __slots__ = ("filled", "names", "num_prompt_tokens", "plan", "planned_at", "sequences")

    def __init__(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Entry i of `sequences` has row i of the plan."""
        self.plan = plan
        self.sequences = sequences
        self.planned_at = 0.0
        # Of rows that have more than one token to go.
        self.num_prompt_tokens = 0
        self.filled: ListOf[Filled] = ()
        # Of blocks that others may wait for.
        self.names: ListOf[bytes] = ()


def match(record: PlanRecord, result: StepResult, limits: Limits) -> None:
    """Raise unless the result answers the plan and its columns fit together."""
    plan = record.plan
    if result.step != plan.step:
        raise WorkerContractError(f"result of step {result.step}, step {plan.step} expected")
    if result.rows != plan.rows:
        raise WorkerContractError(f"step {plan.step}: the result names other rows than the plan")
    if result.num_computed_tokens != plan.num_computed_tokens:
        pairs = zip(plan.rows, plan.num_computed_tokens, result.num_computed_tokens, strict=False)
        row, planned, echoed = next((p for p in pairs if p[1] != p[2]), (-1, -1, -1))
        raise WorkerContractError(
            f"step {plan.step}: row {row} echoes {echoed} computed tokens, planned were {planned}"
        )
    counts, codes = result.num_sampled_tokens, result.finish_codes
    if len(counts) != len(plan.rows) or len(codes) != len(plan.rows):
        raise WorkerContractError(f"step {plan.step}: columns of unequal length")
    if sum(counts) != len(result.token_ids):
        raise WorkerContractError(
            f"step {plan.step}: {len(result.token_ids)} token ids, {sum(counts)} counted"
        )
    if max(codes, default=0) > _LAST_CODE:
        raise WorkerContractError(f"step {plan.step}: unknown finish code {max(codes)}")
    num_rows = len(plan.rows) if limits.is_drafting else 0
    if not len(result.num_drafted_tokens) == len(result.num_accepted_tokens) == num_rows:
        raise WorkerContractError(f"step {plan.step}: columns of drafts for other rows")
    if max(result.num_drafted_tokens, default=0) > limits.num_speculative_tokens:
        raise WorkerContractError(f"step {plan.step}: more drafts than were ordered")


def deliver(
    record: PlanRecord, result: StepResult, owner: BatchOwner, now: float, limits: Limits
) -> int:
    """Append the tokens of a matching result to sequences and outlets, report ends.

    Returns how many tokens were delivered.
    """
    if result.prompt_logprobs:
        _deliver_prompts(record, result, owner)
    slow = _SlowLane(record, result, owner, now, limits)
    if limits.is_drafting:
        _deliver_runs(record, result, owner, slow)
    else:
        _deliver_tokens(record, result, owner, slow)
    slow.check_all_logprobs_used()
    return len(result.token_ids) - slow.num_dropped


def _deliver_prompts(record: PlanRecord, result: StepResult, owner: BatchOwner) -> None:
    """Hand on what prompts are worth to the sequences that asked and have not left."""
    by_row = dict(zip(result.rows, record.sequences, strict=True))
    for row, start, entries in result.prompt_logprobs:
        sequence = by_row.get(row)
        if sequence is None or sequence.sampling.num_prompt_logprobs is None:
            raise WorkerContractError(
                f"step {result.step}: row {row} brings logprobs of a prompt, unasked"
            )
        if not 1 <= start <= start + len(entries) <= sequence.num_prompt_tokens:
            raise WorkerContractError(
                f"step {result.step}: row {row} brings logprobs from {start} on, past its prompt"
            )
        if sequence.state is not SequenceState.ENDED:
            sequence.outlet.columns.prompt_logprobs.append((sequence.stream_id, start, entries))
            owner.outlet_filled(sequence)


def _deliver_tokens(
    record: PlanRecord, result: StepResult, owner: BatchOwner, slow: "_SlowLane"
) -> None:
    token_ids = result.token_ids
    has_failures = bool(result.row_failures)
    start = 0
    outlet = None
    for index, (sequence, count, code) in enumerate(
        zip(record.sequences, result.num_sampled_tokens, result.finish_codes, strict=True)
    ):
        if count != 1 or code or not sequence.is_plain or has_failures:
            slow.take(index, sequence, token_ids[start : start + count])
        else:
            if sequence.outlet is not outlet:
                outlet = sequence.outlet
                owner.outlet_filled(sequence)
                add_stream, add_previous, add_count, add_token = outlet.appenders()
            output = sequence.output_token_ids
            token = token_ids[start]
            add_stream(sequence.stream_id)
            add_previous(len(output))
            add_count(1)
            add_token(token)
            output.append(token)
        start += count


def _deliver_runs(
    record: PlanRecord, result: StepResult, owner: BatchOwner, slow: "_SlowLane"
) -> None:
    """As `_deliver_tokens`, for a worker with drafts."""
    token_ids = result.token_ids
    has_failures = bool(result.row_failures)
    start = 0
    outlet = None
    columns = zip(
        record.sequences,
        result.num_sampled_tokens,
        result.finish_codes,
        result.num_drafted_tokens,
        result.num_accepted_tokens,
        strict=True,
    )
    for index, (sequence, count, code, drafted, accepted) in enumerate(columns):
        run = token_ids[start : start + count]
        start += count
        is_usual = accepted == count - 1 and accepted <= drafted and not code
        if not is_usual or not sequence.is_plain or has_failures:
            slow.take(index, sequence, run)
            continue
        if sequence.outlet is not outlet:
            outlet = sequence.outlet
            owner.outlet_filled(sequence)
            add_stream, add_previous, add_count, _ = outlet.appenders()
            extend_tokens = outlet.columns.token_ids.extend
            add_drafted = outlet.columns.num_drafted_tokens.append
            add_accepted = outlet.columns.num_accepted_tokens.append
        output = sequence.output_token_ids
        add_stream(sequence.stream_id)
        add_previous(len(output))
        add_count(count)
        extend_tokens(run)
        output.extend(run)
        sequence.num_planned_tokens += accepted
        sequence.num_drafted_tokens += drafted
        sequence.num_accepted_tokens += accepted
        add_drafted(sequence.num_drafted_tokens)
        add_accepted(sequence.num_accepted_tokens)


class _SlowLane:
    """Rows with anything unusual: first tokens, ends, chunks, logprobs, runs, failures."""

    __slots__ = ("_limits", "_logprobs", "_now", "_owner", "_record", "_result", "num_dropped")

    def __init__(
        self,
        record: PlanRecord,
        result: StepResult,
        owner: BatchOwner,
        now: float,
        limits: Limits,
    ) -> None:
        """Nothing of the result is used yet."""
        self._record = record
        self._result = result
        self._owner = owner
        self._now = now
        self._limits = limits
        self._logprobs = iter(result.logprobs)
        # Tokens of sequences that had left.
        self.num_dropped = 0

    def take(self, index: int, sequence: Sequence, token_ids: "array[int]") -> None:
        """Tokens and end of one row."""
        logprobs: list[TokenLogprobs] = []
        if sequence.wants_logprobs:
            logprobs = list(islice(self._logprobs, len(token_ids)))
            if len(logprobs) != len(token_ids):
                raise WorkerContractError(f"step {self._result.step}: too few logprobs")
        if sequence.state is SequenceState.ENDED:
            self.num_dropped += len(token_ids)
            return  # it left while this plan was in flight
        failure = self._result.row_failures.get(self._result.rows[index])
        if failure is not None:
            self._owner.sequence_failed(sequence, failure, self._now)
            return
        code = self._result.finish_codes[index]
        plan = self._record.plan
        end = plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index]
        if end < sequence.num_tokens:  # a chunk that does not reach the last known token
            if token_ids or code:
                raise self._broken(index, "sampled before the end of its known tokens")
            return
        self._check_count(index, sequence, len(token_ids))
        if self._limits.is_drafting:
            self._count_drafts(index, sequence)
        self._append(sequence, token_ids, logprobs)
        if code:
            self._owner.sequence_finished(sequence, FinishCode(code), self._now)
        elif sequence.num_tokens >= sequence.total_limit:
            raise self._broken(index, f"has its {sequence.total_limit} tokens and was not ended")

    def check_all_logprobs_used(self) -> None:
        """Raise when the result brings more logprobs than its rows asked for."""
        if next(self._logprobs, None) is not None:
            raise WorkerContractError(f"step {self._result.step}: too many logprobs")

    def _check_count(self, index: int, sequence: Sequence, count: int) -> None:
        if not count:
            raise self._broken(index, "brings no token")
        limits, result = self._limits, self._result
        if limits.is_drafting:
            drafted, accepted = result.num_drafted_tokens[index], result.num_accepted_tokens[index]
            # A run that ends the sequence may be cut among its drafts.
            is_whole = count == accepted + 1 or (count == accepted and result.finish_codes[index])
            if accepted > drafted or not is_whole:
                text = f"brings {count} tokens, {accepted} of {drafted} drafts among them"
                raise self._broken(index, text)
        elif count > 1 and not limits.is_replay:
            raise self._broken(index, f"brings {count} tokens where one was ordered")
        if sequence.num_tokens + count > sequence.total_limit:
            raise self._broken(index, f"goes past its {sequence.total_limit} tokens")

    def _count_drafts(self, index: int, sequence: Sequence) -> None:
        """Drafts that were kept have been computed: the sequence is further than it was planned."""
        accepted = self._result.num_accepted_tokens[index]
        sequence.num_planned_tokens += accepted
        sequence.num_drafted_tokens += self._result.num_drafted_tokens[index]
        sequence.num_accepted_tokens += accepted

    def _append(
        self, sequence: Sequence, token_ids: "array[int]", logprobs: list[TokenLogprobs]
    ) -> None:
        columns = sequence.outlet.columns
        columns.stream_ids.append(sequence.stream_id)
        columns.num_previous_tokens.append(len(sequence.output_token_ids))
        columns.num_tokens.append(len(token_ids))
        columns.token_ids.extend(token_ids)
        columns.logprobs += logprobs
        if self._limits.is_drafting:
            columns.num_drafted_tokens.append(sequence.num_drafted_tokens)
            columns.num_accepted_tokens.append(sequence.num_accepted_tokens)
        self._owner.outlet_filled(sequence)
        sequence.output_token_ids.extend(token_ids)
        if sequence.first_token_at is None:
            sequence.first_token_at = self._now
            columns.starts.append((sequence.stream_id, sequence.stats(self._now, 0)))
        if sequence.state is SequenceState.RUNNING:
            sequence.is_plain = not sequence.wants_logprobs
            if sequence.num_tokens - sequence.num_planned_tokens > 1:
                # After a run there is more than one token to catch up with: leave the flat list.
                sequence.plan_limit = min(sequence.plan_limit, sequence.num_planned_tokens)

    def _broken(self, index: int, what: str) -> WorkerContractError:
        result = self._result
        return WorkerContractError(f"step {result.step}: row {result.rows[index]} {what}")
