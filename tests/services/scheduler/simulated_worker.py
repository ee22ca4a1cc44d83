"""A worker for tests of the scheduler: keeps rows as a real one does and checks every plan.

It holds the plans of an epoch against the rules of the step protocol (rows, blocks, positions) and
answers each with tokens that depend only on the sequence and the position, so that a stream can be
compared with what an undisturbed run gives. Its cache holds, per slot, what KV depends on: all
tokens up to there and the weights. A row is computed only if the slots before its first position
hold its own tokens under the weights that it began with.
"""

from array import array
from dataclasses import dataclass, field

from services.scheduler.plan import Capacity, FinishCode, NewSequence, StepPlan, StepResult
from shared.sampling import TokenLogprobs

A_DRAFT, NOTHING = -1, -1
# Weights that there never were.
SPOILT = -2


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
    # What the slots of its tokens have to hold, as far as it was needed.
    contents: list[int] = field(default_factory=list)
    is_over: bool = False
    is_full: bool = False


class SimulatedWorker:
    """Runs plans in order; `end_at` maps a seed to (absolute length, code) of an early end."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.rows: dict[int, Row] = {}
        # What was written to each slot of each block, as an index of `texts`, or a draft.
        self.kv: dict[tuple[int, int], int] = {}
        # All contents: the one before and the token, or the weights where nothing is before.
        self.texts: list[tuple[int, int]] = []
        self._places: dict[tuple[int, int], int] = {}
        # Grows when the weights change; rows that run by then are still those of the old ones.
        self.weights = 0
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
            self.rows[new.row] = Row(
                new,
                tokens,
                num_computed=new.num_computed_tokens,
                contents=[self._intern(NOTHING, self.weights)],
            )
        self._check_plan(plan)
        result = self._compute(plan)
        for row in plan.freed_rows:
            del self.rows[row]
        return result

    def _check_plan(self, plan: StepPlan) -> None:
        assert len(set(plan.rows)) == len(plan.rows)
        is_news = bool(plan.rows or plan.freed_rows or plan.tick)
        assert is_news, "nobody else waits for a plan without rows"
        assert len(plan.rows) <= self.capacity.max_num_seqs
        assert sum(plan.num_scheduled_tokens) <= self.capacity.max_num_batched_tokens
        assert min(plan.num_scheduled_tokens, default=1) >= 1
        assert not set(plan.rows) & set(plan.freed_rows)
        start = 0
        for row, count in zip(plan.rows, plan.num_new_blocks, strict=True):
            self.rows[row].blocks += plan.new_blocks[start : start + count]
            start += count
        assert start == len(plan.new_blocks)
        size = self.capacity.block_size_tokens
        rows = [self.rows[number] for number in plan.rows]
        tables = [(row.blocks, row.num_computed // size) for row in rows]
        written = [block for blocks, first in tables for block in blocks[first:]]
        shared = {block for blocks, first in tables for block in blocks[:first]}
        assert all(0 < block < self.capacity.num_blocks for block in written)
        assert len(set(written)) == len(written), "two rows of one step write to a block"
        assert not set(written) & shared, "a row writes to a block that another one reads"

    def _compute(self, plan: StepPlan) -> StepResult:
        counts, tokens, codes = [], array("I"), []
        self.drafted, self.accepted = [], []
        logprobs: list[TokenLogprobs] = []
        for number in plan.rows:
            # Before anything is written: what a step shares was computed by the steps before it.
            if not self.rows[number].is_over:
                self._check_kv(self.rows[number])
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
        self._write_kv(row, num_known, drafted)
        row.num_computed += num_known + accepted
        row.num_accepted, row.num_drafts = accepted, 0
        self._note_drafts(drafted, accepted)
        if row.num_computed < len(row.tokens):
            return [], FinishCode.NONE
        first = len(row.tokens)
        run, code = self._sample(row, self.run_length + accepted)
        # Drafts that were kept are the tokens themselves.
        for position in range(first, min(first + accepted, len(row.tokens))):
            self.kv[self._slot(row, position)] = self._content(row, position)
        left = self._limit(row) - len(row.tokens) - 1
        wanted = min(self.capacity.num_speculative_tokens, left)
        row.num_drafts = self._placed(wanted, room - len(row.tokens) + 2)
        return run, code

    def text(self, content: int) -> tuple[int, list[int]]:
        """Weights and tokens of a content."""
        before, token = self.texts[content]
        tokens: list[int] = []
        while before != NOTHING:
            tokens.append(token)
            before, token = self.texts[before]
        return token, tokens[::-1]

    def spoil(self, row: Row, first: int) -> None:
        """What the last step of a row wrote, from a position on, is of no use to anybody."""
        nothing = self._intern(NOTHING, SPOILT)
        size = self.capacity.block_size_tokens
        for position in range(first, len(row.blocks) * size):
            self.kv[self._slot(row, position)] = nothing

    def _intern(self, before: int, token: int) -> int:
        place = self._places.setdefault((before, token), len(self.texts))
        if place == len(self.texts):
            self.texts.append((before, token))
        return place

    def _content(self, row: Row, position: int) -> int:
        contents = row.contents
        while len(contents) <= position + 1:
            contents.append(self._intern(contents[-1], row.tokens[len(contents) - 1]))
        return contents[position + 1]

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        size = self.capacity.block_size_tokens
        return row.blocks[position // size], position % size

    def _check_kv(self, row: Row) -> None:
        for position in range(row.num_computed):
            content = self._content(row, position)
            assert self.kv.get(self._slot(row, position)) == content, "KV of something else"

    def _write_kv(self, row: Row, num_known: int, num_drafts: int) -> None:
        first = row.num_computed
        for position in range(first, first + num_known):
            self.kv[self._slot(row, position)] = self._content(row, position)
        for position in range(first + num_known, first + num_known + num_drafts):
            self.kv[self._slot(row, position)] = A_DRAFT

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
