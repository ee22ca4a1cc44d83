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
  further block per growing sequence stays free, beside the watermark. Later it grows a block at a
  time; when none is left, one gives way (`policy.py`).
- A sequence that gave way comes back when all that run, itself included, have room for two further
  blocks, at its next return for four, and so on: it cannot lose its place again and again.
- Those that wait start in the order of the queue; one that does not fit is passed (`passing.py`).
- A sequence begins with the blocks that hold its start already; while a plan in flight computes the
  one behind those, it waits.
- The tokens of a result go to the sequences that its plan recorded, whoever has the row by then.
- A broken rule of the worker raises `WorkerContractError`; the batch is of no use afterwards.
"""

from collections import deque
from collections.abc import Iterator

from services.scheduler.draft_counts import DraftCounts
from services.scheduler.holdings import Holdings
from services.scheduler.limits import Limits
from services.scheduler.naming import Naming
from services.scheduler.pace import StepClock
from services.scheduler.passing import Passing
from services.scheduler.plan import StepPlan, StepResult, WorkerContractError
from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.prefix_cache import PrefixCache
from services.scheduler.results import BatchOwner, PlanRecord, deliver, match
from services.scheduler.sequence import Sequence, SequenceState
from services.scheduler.throttle import PromptThrottle
from services.scheduler.waiting import WaitingQueue

# So many that wait may be passed in a step.
MAX_PASSED = 8
# Room for 2**6 blocks each is all that a sequence waits for after many preemptions.
MAX_DOUBLINGS = 6
# A tenant is charged for so many output tokens of a sequence at a time.
CHARGED_TOKENS = 64


class Batch:
    """Running sequences, plans in flight and holdings of one epoch.

    Args:
        limits: Bounds of the epoch.
        waiting: Queue from which sequences are admitted and to which preempted ones go.
        owner: Is told what results mean.
        cache: The prefix cache of the epoch.
        clock: Follows the steps of the replica.
    """

    def __init__(
        self,
        limits: Limits,
        waiting: WaitingQueue,
        owner: BatchOwner,
        cache: PrefixCache,
        clock: StepClock,
    ) -> None:
        """Nothing runs, nothing is in flight."""
        self.limits = limits
        self.cache = cache
        self.holdings = Holdings(limits, cache.pool)
        # In the order of admission.
        self.running: dict[Sequence, None] = {}
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.drafts = DraftCounts(limits.num_speculative_tokens)
        self.num_recomputed_tokens = 0
        self._waiting = waiting
        self._policy = waiting.policy
        self._throttle = PromptThrottle(limits)
        self._clock = clock
        # Time of the last plan.
        self._now = 0.0
        # What stopped the last walk along the queue: nothing starts before it changes.
        self._stopped_at: tuple[int, ...] | None = None
        # A head for which nobody can be pushed out, and when that was found.
        self._spared_at: tuple[int, ...] | None = None
        self._owner = owner
        self._naming = Naming(cache, limits.block_size)
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
    def is_full(self) -> bool:
        """Whether no further plan may be in flight."""
        return len(self._in_flight) >= self.limits.max_plans_in_flight

    @property
    def last_planned_step(self) -> int:
        """Step of the latest plan, 0 before the first."""
        return self._next_step - 1

    @property
    def num_catch_up_tokens(self) -> int:
        """Tokens that its sequences have to catch up with, beyond one each."""
        return sum(s.num_tokens - s.num_planned_tokens for s in self._catching_up if s.plan_limit)

    @property
    def decodes(self) -> bool:
        """Whether a sequence has one token to go in each step."""
        return bool(self._decoding)

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence is catching up, or waits to."""
        return bool(self._catching_up or len(self._waiting))

    def plan(
        self, now: float, *, takes_prompts: bool = True, has_peers: bool = False
    ) -> StepPlan | None:
        """The next plan; None when the window is full or nothing can be ordered.

        Without `takes_prompts` it is one of decoding sequences alone; with `has_peers` replicas
        that step together have sequences, for which a long step is long as well.
        """
        if self.is_full:
            return None
        self._now = now
        if takes_prompts and self._policy.is_priority and len(self._waiting):
            self._displace(now)
        num_preemptions = self.num_preemptions
        builder = self._plan_decodes()
        if not takes_prompts:
            return self._issue(builder) if builder.sequences else None
        budget = self.limits.max_num_batched_tokens
        budget -= len(builder.sequences) * self.limits.num_decode_tokens
        num_others = len(builder.sequences) + len(self._catching_up) + len(self._waiting)
        self._throttle.begin(has_others=has_peers or num_others > 1)
        budget = self._plan_chunks(builder, budget)
        if num_preemptions == self.num_preemptions:
            self._admit(builder, budget, now)
        lacks_row = len(self._waiting) and self.holdings.has_only_ended_rows
        return self._issue(builder) if builder.sequences or lacks_row else None

    @property
    def is_left_over(self) -> bool:
        """Whether the worker still holds rows that ended, and no plan comes that would say so."""
        is_idle = not (self.running or self._in_flight or len(self._waiting))
        return is_idle and self.holdings.has_ended_rows

    def plan_nothing(self) -> StepPlan:
        """A plan without rows, for a step that only the others of a world need."""
        return self._issue(PlanBuilder(self._next_step, [], 1))

    def _issue(self, builder: PlanBuilder) -> StepPlan:
        plan = builder.build(self.holdings.announce(builder.step))
        record = PlanRecord(plan, builder.sequences)
        record.planned_at, record.num_prompt_tokens = self._now, builder.num_prompt_tokens
        record.filled, record.names = self._naming.take()
        self._in_flight.append(record)
        self._next_step += 1
        return plan

    def remove(self, sequence: Sequence, state: SequenceState) -> None:
        """Take a running sequence out; its row and blocks come back when that is safe."""
        del self.running[sequence]
        self._policy.charge_output(sequence)
        self._num_growable -= sequence.is_growable
        self.cache.publish(sequence, self._num_computed_tokens(sequence))
        self.holdings.release(sequence)
        sequence.leave(state)

    def tidy(self) -> bool:
        """Do what no step has to wait for; whether there is more of it to do."""
        computing = [s for s in self._catching_up if s.plan_limit]
        return self._naming.tidy(self._waiting, computing, self.limits.max_num_batched_tokens)

    def clear_cache(self) -> int:
        """Let nobody share what was computed so far; returns how many blocks that concerns."""
        return self.cache.clear(list(self.running))

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
        needed, is_certain = self.holdings.needed_blocks(sequence)
        holdings = self.holdings
        while holdings.num_free_blocks < needed:
            if not is_certain or holdings.num_free_blocks + self._num_coming_back() >= needed:
                return False
            victim = self._policy.victim(self.running)
            self._preempt(victim)
            if victim is sequence:
                return False
        if needed > 0:
            holdings.take_blocks(sequence, needed)
        if len(sequence.output_token_ids) - sequence.num_charged_tokens >= CHARGED_TOKENS:
            self._policy.charge_output(sequence)
        self._naming.note_growth(sequence)
        self._set_plan_limit(sequence)
        return True

    def _num_coming_back(self) -> int:
        """Blocks that the results of the plans in flight surely set free."""
        return self.holdings.num_coming_back(self._ending())

    def _ending(self) -> Iterator[Sequence]:
        """Running sequences that the plans in flight surely end."""
        return (s for s in self.running if s.num_planned_tokens >= s.total_limit - 1)

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence, SequenceState.WAITING)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        num_blocks = self.limits.blocks_for(self._positions(sequence))
        self._waiting.add(sequence, self._now, num_blocks)

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
        count = self._throttle.count_for(missing, budget)
        self._throttle.note(missing, count)
        builder.num_prompt_tokens += count
        builder.add(sequence, count)
        self._naming.note_chunk(sequence)
        if count == missing:
            self._decoding.append(sequence)
        else:
            self._catching_up.append(sequence)
        return count

    def _displace(self, now: float) -> None:
        """Push out running sequences for a more urgent one that waits for a row or for blocks."""
        head = self._waiting.head(now)
        if head is None or self.holdings.is_in_flight(head):
            return
        # Who runs gets more urgent only when somebody starts.
        mark = (head.number, head.priority, self._num_admissions)
        if mark == self._spared_at:
            return
        victims = self._policy.displaceable(self.running, head)
        if not victims:
            self._spared_at = mark
            return
        lacks_row = self._num_seats() <= 0
        holdings, cached = self.holdings, self.cache.find(head)
        needed = holdings.num_taken_by(cached, self._blocks_to_start(head, cached))
        needed += self._reserve(head)
        if needed > holdings.num_free_blocks + holdings.num_coming_back(victims):
            return
        for victim in victims:
            room = holdings.num_free_blocks + holdings.num_coming_back(())
            if not lacks_row and needed <= room:
                return
            lacks_row = False
            victim.num_displacements += 1
            self._preempt(victim)

    def _admit(self, builder: PlanBuilder, budget: int, now: float) -> None:
        """Give rows and blocks to waiting sequences, in order, as far as there is room."""
        num_seats = min(budget, self._num_seats())
        if num_seats <= 0 or not len(self._waiting):
            return
        self._naming.catch_up()
        mark = (
            self._waiting.version,
            self.cache.version,
            self.holdings.num_free_blocks,
            len(self.running),
            int(now),
        )
        if mark == self._stopped_at and self.running:
            return
        passing = Passing()
        is_stopped_by_blocks = True
        num_before = self._num_admissions
        for place, sequence in enumerate(self._waiting.candidates(now, num_seats + MAX_PASSED)):
            num_started = self._num_admissions - num_before
            if not budget or num_started >= num_seats or not self.holdings.has_free_row:
                return
            if place - num_started >= MAX_PASSED:
                break
            cached = self.cache.find(sequence)
            count = self._blocks_to_start(sequence, cached)
            needed = self.holdings.num_taken_by(cached, count)
            if self.holdings.is_in_flight(sequence):
                is_stopped_by_blocks = False
                passing.stop(sequence, needed)
                continue
            if self.cache.is_coming(sequence):
                is_stopped_by_blocks = False
                continue
            if not passing.allows(needed) or not self._has_room(sequence, needed):
                passing.stop(sequence, needed)
                continue
            missing = sequence.num_tokens - len(cached) * self.limits.block_size
            if not self._throttle.may_start(missing, budget):
                is_stopped_by_blocks = False
                continue
            passing.note(needed)
            self._waiting.take(sequence, now)
            self._start(sequence, cached, count, now)
            builder.describe(sequence)
            budget -= self._plan_chunk(builder, sequence, budget)
            is_stopped_by_blocks = False
        self._stopped_at = mark if is_stopped_by_blocks else None

    def _num_seats(self) -> int:
        """How many more can run: those that the plans in flight surely end take no seat."""
        num_free = self.limits.max_num_seqs - len(self.running)
        if num_free <= 0 and self._in_flight:
            num_free += sum(s.last_step < self._next_step for s in self._ending())
        return num_free

    def _blocks_to_start(self, sequence: Sequence, cached: list[int]) -> int:
        """Blocks that a waiting sequence needs beside those that hold its start already."""
        return self.limits.blocks_for(self._positions(sequence)) - len(cached)

    def _positions(self, sequence: Sequence) -> int:
        """Positions that need a block when the sequence starts.

        With room for the first drafts, which are proposed behind the last known token.
        """
        most = sequence.num_tokens + self.limits.num_proposal_tokens
        return min(most, sequence.total_limit - 1)

    def _has_room(self, sequence: Sequence, needed: int) -> bool:
        """Alone it always fits; beside others it may not take what they need next."""
        left = self.holdings.num_free_blocks - needed
        # The second is never less than the first, and looks at all that run.
        return left >= (self._num_growable if self.running else 0) and left >= self._reserve(
            sequence
        )

    def _reserve(self, sequence: Sequence) -> int:
        """Blocks that stay free beside those that a sequence starts with."""
        if not self.running:
            return 0
        reserve = self._num_growable
        if sequence.num_preemptions:
            most = 1 << min(sequence.num_preemptions, MAX_DOUBLINGS)
            reserve = sum(self._growth(s, most) for s in self.running)
            reserve += self._growth(sequence, most)
        return reserve + self.limits.num_watermark_blocks

    def _growth(self, sequence: Sequence, most: int) -> int:
        """Blocks that the sequence may come to need, `most` of them at most."""
        held = len(sequence.blocks) or self.limits.blocks_for(self._positions(sequence))
        return min(most, self.limits.blocks_for(sequence.total_limit - 1) - held)

    def _start(self, sequence: Sequence, cached: list[int], count: int, now: float) -> None:
        """The sequence runs, with `count` new blocks."""
        num_hit = len(cached) * self.limits.block_size
        missing = sequence.num_tokens - num_hit
        if sequence.planned_at is None:
            sequence.planned_at = now
            sequence.num_cached_tokens = min(num_hit, sequence.num_prompt_tokens)
            self.cache.count(sequence, num_hit)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self._policy.charge_prompt(sequence, missing)
        else:
            self.num_recomputed_tokens += missing
        sequence.num_passed_blocks = 0
        self._num_admissions += 1
        self._clock.num_started += 1
        sequence.admission = self._num_admissions
        sequence.state = SequenceState.RUNNING
        sequence.row = self.holdings.take_row()
        sequence.num_planned_tokens = num_hit
        sequence.num_named_blocks = len(cached)
        sequence.found = None
        sequence.num_sent_blocks = 0
        self.holdings.share_blocks(sequence, cached)
        self.holdings.take_blocks(sequence, count)
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
        self._naming.settle(record)
        wait_s = result.wait_us / 1e6
        self._clock.finished(record.planned_at, now, record.num_prompt_tokens, wait_s)
        self.num_output_tokens += deliver(record, result, self._owner, now, self.limits)
        if self.limits.num_speculative_tokens:
            self.drafts.add(result.num_drafted_tokens, result.num_accepted_tokens)
        self._clock.left(has_work=bool(self.running) or bool(len(self._waiting)))

    def _num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens of a sequence that results say are computed; more where no new block is full."""
        most = min(sequence.num_planned_tokens, sequence.num_tokens - 1)
        has_news = most // self.limits.block_size > sequence.num_named_blocks
        if not has_news or not self.holdings.is_in_flight(sequence):
            return most
        record = next(r for r in self._in_flight if sequence in r.sequences)
        return min(most, record.plan.num_computed_tokens[record.sequences.index(sequence)])

    def check(self) -> None:
        """Assert the laws of the batch; for tests."""
        self.holdings.check(self.running)
        self.cache.check(len(self._in_flight))
        num_ending = sum(1 for _ in self._ending())
        assert len(self.running) - num_ending <= self.limits.max_num_seqs
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
