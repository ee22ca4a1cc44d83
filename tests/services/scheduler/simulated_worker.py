"""A worker for tests of the scheduler: keeps rows as a real one does and checks every plan.

It holds the plans of an epoch against the rules of the step protocol (rows, blocks, positions) and
answers each with tokens that depend only on the sequence and the position, so that a stream can be
compared with what an undisturbed run gives.
"""

from array import array
from dataclasses import dataclass, field

from services.scheduler.plan import Capacity, FinishCode, NewSequence, StepPlan, StepResult
from shared.sampling import TokenLogprobs


def expected_token(seed: int, position: int) -> int:
    """The token that a sequence with `seed` has at an absolute position."""
    return (seed * 1_000_003 + position * 7919) % 50_000


@dataclass
class Row:
    """What the worker knows about a row."""

    new: NewSequence
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    last_step: int = 0
    is_over: bool = False
    is_full: bool = False


class SimulatedWorker:
    """Runs plans in order; `end_at` maps a seed to (absolute length, code) of an early end."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.rows: dict[int, Row] = {}
        self.step = 0
        self.end_at: dict[int, tuple[int, FinishCode]] = {}
        # Tokens per result of a row, for replay workers.
        self.run_length = 1
        # The last step whose result the scheduler has read; None where nobody tells.
        self.last_read_step: int | None = None
        # Times that drafts were fewer for want of blocks.
        self.num_without_place = 0
        # Drafts verified and kept by all steps, and by row of the last one.
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one plan as the contract says; an assertion fails where the plan breaks it."""
        self.step += 1
        assert plan.step == self.step
        for new in plan.new_sequences:
            assert new.row not in self.rows, "row handed out before it came back"
            assert 0 <= new.row < self.capacity.num_rows
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self.rows[new.row] = Row(new, tokens, num_computed=new.num_computed_tokens)
        self._check_plan(plan)
        result = self._compute(plan)
        for row in plan.freed_rows:
            del self.rows[row]
        return result

    def _check_plan(self, plan: StepPlan) -> None:
        assert len(set(plan.rows)) == len(plan.rows)
        assert plan.rows or plan.tick is not None, "nobody else waits for a plan without rows"
        assert len(plan.rows) <= self.capacity.max_num_seqs
        assert sum(plan.num_scheduled_tokens) <= self.capacity.max_num_batched_tokens
        assert min(plan.num_scheduled_tokens, default=1) >= 1
        assert not set(plan.rows) & set(plan.freed_rows)
        start = 0
        for row, count in zip(plan.rows, plan.num_new_blocks, strict=True):
            self.rows[row].blocks += plan.new_blocks[start : start + count]
            start += count
        assert start == len(plan.new_blocks)
        used = [block for row in plan.rows for block in self.rows[row].blocks]
        assert len(set(used)) == len(used), "two rows of one step share a block"
        assert all(0 < block < self.capacity.num_blocks for block in used)

    def _compute(self, plan: StepPlan) -> StepResult:
        counts, tokens, codes = [], array("I"), []
        self.drafted, self.accepted = [], []
        logprobs: list[TokenLogprobs] = []
        columns = zip(plan.rows, plan.num_scheduled_tokens, plan.num_computed_tokens, strict=True)
        for number, scheduled, computed in columns:
            row = self.rows[number]
            assert not row.is_full or self.run_length > 1, "a row that surely had ended is planned"
            run, code = (
                ([], FinishCode.NONE) if row.is_over else self._advance(row, scheduled, computed)
            )
            if row.is_over and not run:
                self._note_drafts(0, 0)
            row.last_step = plan.step
            counts.append(len(run))
            tokens.extend(run)
            codes.append(int(code))
            self.accepted[-1] = min(self.accepted[-1], len(run))
            if row.new.sampling.num_logprobs is not None:
                logprobs += [TokenLogprobs(logprob=-float(token), rank=1) for token in run]
        return StepResult(
            step=plan.step,
            rows=list(plan.rows),
            num_computed_tokens=list(plan.num_computed_tokens),
            num_sampled_tokens=counts,
            token_ids=tokens,
            finish_codes=codes,
            logprobs=logprobs,
            num_drafted_tokens=self.drafted if self.capacity.num_speculative_tokens else [],
            num_accepted_tokens=self.accepted if self.capacity.num_speculative_tokens else [],
        )

    def _note_drafts(self, drafted: int, accepted: int) -> None:
        self.drafted.append(drafted)
        self.accepted.append(accepted)

    def _advance(self, row: Row, scheduled: int, computed: int) -> tuple[list[int], FinishCode]:
        self._check_progress(row, computed)
        missing = len(row.tokens) - row.num_computed
        room = len(row.blocks) * self.capacity.block_size_tokens
        num_known = min(scheduled, missing)
        assert row.num_computed + num_known <= room, "a position without a block"
        num_more = scheduled - num_known
        assert num_more <= self.capacity.num_speculative_tokens, "a token that nobody knows"
        drafted = self._placed(min(row.num_drafts, num_more), room - len(row.tokens))
        luck = expected_token(row.new.sampling.seed + 1, len(row.tokens))
        accepted = min(drafted, luck % (self.capacity.num_speculative_tokens + 2))
        row.num_computed += num_known + accepted
        row.num_accepted, row.num_drafts = accepted, 0
        self._note_drafts(drafted, accepted)
        if row.num_computed < len(row.tokens):
            return [], FinishCode.NONE
        run, code = self._sample(row, self.run_length + accepted)
        left = self._limit(row) - len(row.tokens) - 1
        wanted = min(self.capacity.num_speculative_tokens, left)
        row.num_drafts = self._placed(wanted, room - len(row.tokens) + 2)
        return run, code

    def _placed(self, wanted: int, places: int) -> int:
        self.num_without_place += places < wanted
        return max(0, min(wanted, places))

    def _check_progress(self, row: Row, computed: int) -> None:
        """A plan made before the last result of the row counts none of its drafts."""
        least = row.num_computed - row.num_accepted
        allowed = {row.num_computed, least}
        if self.last_read_step is not None:
            is_read = row.last_step <= self.last_read_step
            allowed = {row.num_computed if is_read else least}
        assert computed in allowed, "a gap in the KV of a row"

    def _limit(self, row: Row) -> int:
        most = len(row.new.prompt_token_ids) + row.new.sampling.max_tokens
        return min(most, self.capacity.max_model_len)

    def _sample(self, row: Row, most: int) -> tuple[list[int], FinishCode]:
        sampling = row.new.sampling
        num_prompt = len(row.new.prompt_token_ids)
        run: list[int] = []
        code = FinishCode.NONE
        while len(run) < most and not code:
            token = expected_token(sampling.seed, len(row.tokens))
            row.tokens.append(token)
            run.append(token)
            end, end_code = self.end_at.get(sampling.seed, (0, FinishCode.NONE))
            if end and len(row.tokens) >= end:
                code = end_code
            elif len(row.tokens) - num_prompt >= sampling.max_tokens:
                code = FinishCode.MAX_TOKENS
            elif len(row.tokens) >= self.capacity.max_model_len:
                code = FinishCode.MAX_MODEL_LEN
        row.is_over = bool(code)
        # Sure before the result is read: drafts that were kept are not.
        row.is_full = len(run) == 1 and code in {FinishCode.MAX_TOKENS, FinishCode.MAX_MODEL_LEN}
        return run, code
