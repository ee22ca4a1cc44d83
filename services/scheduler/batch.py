"""The running sequences of one epoch: plans go out, results come in.

No prefill and no decode phase: a sequence has tokens to catch up with, and a step orders some of
them. Those that have one to go wait in `_decoding`, a flat list that a step walks with three list
comprehensions; those with more wait in `_catching_up`. A sequence of `_decoding` is looked at only
when its next position reaches `plan_limit`: it needs a block, or the plans in flight surely end it.

With drafts a decoding sequence orders its one token and room for all drafts that it may have. How
many are kept only the result tells; until then `num_planned_tokens` counts the one token alone, and
blocks are there for the most that plans in flight can keep. Nobody is pushed out for drafts.

Laws
- A plan names a row once, takes `max_num_batched_tokens` at most, decoding rows first.
- Blocks for everything that is known of a sequence are taken at its admission, and only while one
  further block per growing sequence stays free: a preempted sequence cannot push out another at
  once. Later it grows a block at a time; when none is left, the latest admitted gives way.
- The tokens of a result go to the sequences that its plan recorded, whoever has the row by then.
- A broken rule of the worker raises `WorkerContractError`; the batch is of no use afterwards.
"""

from array import array
from collections import deque

from services.scheduler.draft_counts import DraftCounts
from services.scheduler.holdings import Holdings
from services.scheduler.limits import Limits
from services.scheduler.plan import NewSequence, StepPlan, StepResult, WorkerContractError
from services.scheduler.results import BatchOwner, PlanRecord, deliver, match
from services.scheduler.sequence import FindCachedBlocks, Sequence, SequenceState
from services.scheduler.waiting import WaitingQueue


class PlanBuilder:
    """The columns of a plan under construction."""

    __slots__ = (
        "computed",
        "new_blocks",
        "new_sequences",
        "num_new_blocks",
        "rows",
        "scheduled",
        "sequences",
        "step",
    )

    def __init__(self, step: int, decodes: list[Sequence], num_decode_tokens: int) -> None:
        """One token and its drafts for each of `decodes`, none of which needs a block."""
        self.step = step
        self.sequences = decodes
        self.rows = [s.row for s in decodes]
        self.computed = [s.num_planned_tokens for s in decodes]
        self.scheduled = [num_decode_tokens] * len(decodes)
        self.num_new_blocks = [0] * len(decodes)
        self.new_blocks = array("I")
        self.new_sequences: list[NewSequence] = []
        for sequence in decodes:
            sequence.num_planned_tokens += 1
            sequence.num_steps += 1
            sequence.last_step = step

    def add(self, sequence: Sequence, count: int, num_drafts: int = 0) -> None:
        """Tokens of one further sequence, and the blocks that the worker does not know."""
        new_blocks = sequence.blocks[sequence.num_sent_blocks :]
        sequence.num_sent_blocks = len(sequence.blocks)
        self.sequences.append(sequence)
        self.rows.append(sequence.row)
        self.computed.append(sequence.num_planned_tokens)
        self.scheduled.append(count + num_drafts)
        self.num_new_blocks.append(len(new_blocks))
        self.new_blocks.extend(new_blocks)
        sequence.num_planned_tokens += count
        sequence.num_steps += 1
        sequence.last_step = self.step

    def build(self, freed_rows: list[int]) -> StepPlan:
        """The plan."""
        return StepPlan(
            step=self.step,
            rows=self.rows,
            num_scheduled_tokens=self.scheduled,
            num_computed_tokens=self.computed,
            num_new_blocks=self.num_new_blocks,
            new_blocks=self.new_blocks,
            new_sequences=self.new_sequences,
            freed_rows=freed_rows,
        )


class Batch:
    """Running sequences, plans in flight and holdings of one epoch.

    Args:
        limits: Bounds of the epoch.
        waiting: Queue from which sequences are admitted and to which preempted ones go.
        owner: Is told what results mean.
        find_cached_blocks: The prefix cache.
    """

    def __init__(
        self,
        limits: Limits,
        waiting: WaitingQueue,
        owner: BatchOwner,
        find_cached_blocks: FindCachedBlocks,
    ) -> None:
        """Nothing runs, nothing is in flight."""
        self.limits = limits
        self.holdings = Holdings(limits)
        # In the order of admission.
        self.running: dict[Sequence, None] = {}
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.drafts = DraftCounts(limits.num_speculative_tokens)
        self._waiting = waiting
        self._owner = owner
        self._find_cached_blocks = find_cached_blocks
        self._decoding: list[Sequence] = []
        self._catching_up: list[Sequence] = []
        self._in_flight: deque[PlanRecord] = deque()
        self._num_growable = 0
        self._num_admissions = 0
        self._next_step = 1

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._in_flight)

    @property
    def last_planned_step(self) -> int:
        """Step of the latest plan, 0 before the first."""
        return self._next_step - 1

    @property
    def num_catch_up_tokens(self) -> int:
        """Tokens that its sequences have to catch up with, beyond one each."""
        return sum(s.num_tokens - s.num_planned_tokens for s in self._catching_up if s.plan_limit)

    def plan(self, now: float) -> StepPlan | None:
        """The next plan; None when the window is full or nothing can be ordered."""
        if len(self._in_flight) >= self.limits.max_plans_in_flight:
            return None
        num_preemptions = self.num_preemptions
        builder = self._plan_decodes()
        budget = self.limits.max_num_batched_tokens
        budget -= len(builder.sequences) * self.limits.num_decode_tokens
        budget = self._plan_chunks(builder, budget)
        if num_preemptions == self.num_preemptions:
            self._admit(builder, budget, now)
        return self._issue(builder) if builder.sequences else None

    def plan_nothing(self) -> StepPlan:
        """A plan without rows, for a step that only the others of a world need."""
        return self._issue(PlanBuilder(self._next_step, [], 1))

    def _issue(self, builder: PlanBuilder) -> StepPlan:
        plan = builder.build(self.holdings.announce(builder.step))
        self._in_flight.append(PlanRecord(plan, builder.sequences))
        self._next_step += 1
        return plan

    def remove(self, sequence: Sequence, state: SequenceState) -> None:
        """Take a running sequence out; its row and blocks come back when that is safe."""
        del self.running[sequence]
        self._num_growable -= sequence.is_growable
        self.holdings.release(sequence)
        sequence.leave(state)

    # -- plans -------------------------------------------------------------------------------

    def _plan_decodes(self) -> PlanBuilder:
        """One token for every sequence that has one to go and room for it."""
        decoding, num_tokens = self._decoding, self.limits.num_decode_tokens
        ready = [s for s in decoding if s.num_planned_tokens < s.plan_limit]
        if len(ready) == len(decoding):
            return PlanBuilder(self._next_step, ready, num_tokens)
        stopped = [s for s in decoding if s.num_planned_tokens >= s.plan_limit > 0]
        stopped.sort(key=_admission)
        num_preemptions = self.num_preemptions
        grown: list[Sequence] = []
        held_back: list[Sequence] = []
        for sequence in stopped:
            if sequence.plan_limit:  # not preempted by one before it
                (grown if self._grow(sequence) else held_back).append(sequence)
        if num_preemptions != self.num_preemptions:
            ready = [s for s in ready if s.plan_limit]
        builder = PlanBuilder(self._next_step, ready, num_tokens)
        self._decoding = ready + [s for s in held_back if s.plan_limit]
        for sequence in grown:
            if not sequence.plan_limit:
                continue
            if sequence.num_tokens - sequence.num_planned_tokens > 1:
                self._catching_up.append(sequence)
            else:
                builder.add(sequence, 1, self.limits.num_speculative_tokens)
                self._decoding.append(sequence)
        return builder

    def _grow(self, sequence: Sequence) -> bool:
        """Get room for what comes next; False when it has to wait, is surely over, or lost."""
        position = sequence.num_planned_tokens
        if position >= sequence.total_limit - 1:
            if not self.holdings.is_in_flight(sequence):
                raise WorkerContractError(
                    f"row {sequence.row} has its {sequence.total_limit} tokens and was not ended"
                )
            return False
        needed, is_certain = self._needed_blocks(sequence)
        holdings = self.holdings
        while holdings.num_free_blocks < needed:
            if not is_certain or holdings.num_free_blocks + self._num_coming_back() >= needed:
                return False
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is sequence:
                return False
        if needed > 0:
            holdings.take_blocks(sequence, needed)
        self._set_plan_limit(sequence)
        return True

    def _needed_blocks(self, sequence: Sequence) -> tuple[int, bool]:
        """Blocks to take now, and whether the sequence surely cannot go on without them.

        Room for drafts is taken where it is free. Otherwise there must be room for the next token,
        wherever the plan in flight leaves the sequence; its result tells where that is.
        """
        limits, last = self.limits, sequence.total_limit - 1
        num_positions = max(sequence.num_planned_tokens + 1, sequence.num_tokens)
        num_blocks = len(sequence.blocks)
        most = min(num_positions + limits.num_lookahead_tokens, last)
        needed = limits.blocks_for(most) - num_blocks
        if needed <= self.holdings.num_free_blocks or not limits.num_speculative_tokens:
            return needed, True
        is_in_flight = self.holdings.is_in_flight(sequence)
        if is_in_flight:
            num_positions = min(num_positions + limits.num_speculative_tokens, last)
        return limits.blocks_for(num_positions) - num_blocks, not is_in_flight

    def _num_coming_back(self) -> int:
        """Blocks that the results of the plans in flight surely set free."""
        ending = (s for s in self.running if s.num_planned_tokens >= s.total_limit - 1)
        return self.holdings.num_deferred + sum(len(s.blocks) for s in ending)

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence, SequenceState.WAITING)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push_front(sequence)

    def _set_plan_limit(self, sequence: Sequence) -> None:
        """Adapt the limit to the blocks that the sequence has now."""
        capacity = len(sequence.blocks) * self.limits.block_size
        last = sequence.total_limit - 1  # computing position n yields token n + 1
        if capacity >= last:
            sequence.plan_limit = last
        else:
            # 0 would say that it does not run; a sequence that decodes has planned one at least.
            sequence.plan_limit = max(1, capacity - self.limits.num_lookahead_tokens)
        self._num_growable += (capacity < last) - sequence.is_growable
        sequence.is_growable = capacity < last

    def _plan_chunks(self, builder: PlanBuilder, budget: int) -> int:
        """Further chunks of sequences that are catching up; returns the budget left."""
        if not self._catching_up:
            return budget
        candidates = [s for s in self._catching_up if s.plan_limit]
        self._catching_up = []
        for sequence in candidates:
            if budget:
                budget -= self._plan_chunk(builder, sequence, budget)
            else:
                self._catching_up.append(sequence)
        return budget

    def _plan_chunk(self, builder: PlanBuilder, sequence: Sequence, budget: int) -> int:
        """As many tokens as the budget allows; returns how many."""
        missing = sequence.num_tokens - sequence.num_planned_tokens
        count = min(missing, budget)
        builder.add(sequence, count)
        if count == missing:
            self._decoding.append(sequence)
        else:
            self._catching_up.append(sequence)
        return count

    def _admit(self, builder: PlanBuilder, budget: int, now: float) -> None:
        """Give rows and blocks to waiting sequences, in order, until one has to wait."""
        holdings, limits = self.holdings, self.limits
        while budget and len(self.running) < limits.max_num_seqs and holdings.has_free_row:
            sequence = self._waiting.head
            if sequence is None or holdings.is_in_flight(sequence):
                return
            cached = self._find_cached_blocks(sequence)
            # With room for the first drafts, which are proposed behind the last known token.
            most = sequence.num_tokens + limits.num_proposal_tokens
            needed = limits.blocks_for(min(most, sequence.total_limit - 1)) - len(cached)
            # Alone it always fits; beside others it may not take what they need next.
            if holdings.num_free_blocks - needed < self._num_growable:
                return
            self._waiting.remove(sequence)
            self._start(sequence, cached, needed, now)
            builder.new_sequences.append(_describe(sequence))
            budget -= self._plan_chunk(builder, sequence, budget)

    def _start(self, sequence: Sequence, cached: list[int], needed: int, now: float) -> None:
        """The sequence runs."""
        if sequence.planned_at is None:
            sequence.planned_at = now
            self.num_prompt_tokens += sequence.num_prompt_tokens
        self._num_admissions += 1
        sequence.admission = self._num_admissions
        sequence.state = SequenceState.RUNNING
        sequence.row = self.holdings.take_row()
        sequence.num_cached_tokens = len(cached) * self.limits.block_size
        sequence.num_planned_tokens = sequence.num_cached_tokens
        sequence.blocks = list(cached)
        sequence.num_sent_blocks = 0
        self.holdings.take_blocks(sequence, needed)
        self._set_plan_limit(sequence)
        self.running[sequence] = None

    # -- results -----------------------------------------------------------------------------

    def take_result(self, result: StepResult, now: float) -> None:
        """Hand the tokens of a step to its sequences, tell the owner about ends."""
        if not self._in_flight:
            raise WorkerContractError(f"result of step {result.step} without a plan")
        record = self._in_flight[0]
        match(record, result, self.limits)
        self._in_flight.popleft()
        self.holdings.settle(result.step)
        self.num_output_tokens += deliver(record, result, self._owner, now, self.limits)
        if self.limits.num_speculative_tokens:
            self.drafts.add(result.num_drafted_tokens, result.num_accepted_tokens)

    def check(self) -> None:
        """Assert the laws of the batch; for tests."""
        self.holdings.check(self.running)
        assert len(self.running) <= self.limits.max_num_seqs
        assert self._num_growable == sum(s.is_growable for s in self.running), "growable miscounted"
        placed = [s for s in self._decoding + self._catching_up if s.plan_limit]
        assert len(placed) == len(self.running), "a running sequence is placed twice"
        assert set(placed) == set(self.running)
        for sequence in self.running:
            assert sequence.state is SequenceState.RUNNING
            room = len(sequence.blocks) * self.limits.block_size
            assert sequence.num_planned_tokens <= max(room, sequence.num_tokens)


def _admission(sequence: Sequence) -> int:
    return sequence.admission


def _describe(sequence: Sequence) -> NewSequence:
    """What the worker has to know about a sequence that takes a row."""
    return NewSequence(
        row=sequence.row,
        request_id=sequence.request.request_id,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids[:],
        num_computed_tokens=sequence.num_cached_tokens,
        sampling=sequence.sampling,
        replay=sequence.replay,
        traceparent=sequence.request.traceparent,
    )
