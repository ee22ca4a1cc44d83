"""Plans by hand, and a scheduler of few lines that drives an executor in tests."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.worker.plan import Capacity, NewSequence, StepPlan, StepResult
from shared.errors import RequestError
from shared.sampling import ReplayScript, SamplingSpec


def make_capacity(**changes: Any) -> Capacity:
    values = {
        "num_blocks": 64,
        "block_size": 4,
        "num_rows": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 40,
        "vocab_size": 100,
        "block_size_bytes": 0,
    }
    return Capacity(**(values | changes))


def make_sequence(
    row: int,
    prompt: Sequence[int],
    *,
    outputs: Sequence[int] = (),
    computed: int = 0,
    script: ReplayScript | None = None,
    error: RequestError | None = None,
    traceparent: str = "",
    **sampling: Any,
) -> NewSequence:
    return NewSequence(
        row=row,
        request_id=f"r{row}",
        prompt_token_ids=np.array(prompt, np.uint32),
        output_token_ids=np.array(outputs, np.uint32),
        num_computed_tokens=computed,
        sampling=SamplingSpec(**sampling),
        replay=script,
        traceparent=traceparent,
        error=error,
    )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a plan."""

    scheduled: int = 1
    computed: int = 0
    blocks: tuple[int, ...] = ()


def make_plan(
    step: int,
    entries: Mapping[int, Entry],
    *,
    new: Iterable[NewSequence] = (),
    freed: Iterable[int] = (),
) -> StepPlan:
    values = list(entries.values())
    return StepPlan(
        step=step,
        rows=np.array(list(entries), np.int64),
        num_scheduled_tokens=np.array([e.scheduled for e in values], np.int64),
        num_computed_tokens=np.array([e.computed for e in values], np.int64),
        num_new_blocks=np.array([len(e.blocks) for e in values], np.int64),
        new_blocks=np.array([b for e in values for b in e.blocks], np.uint32),
        new_sequences=tuple(new),
        freed_rows=tuple(freed),
    )


@dataclass
class Live:
    """A sequence as the scheduler of the tests sees it."""

    prompt: list[int]
    row: int
    sampling: dict[str, Any]
    script: ReplayScript | None = None
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: int = 0
    is_new: bool = True
    code: int = 0
    error: RequestError | None = None
    num_steps: int = 0
    drafted: list[tuple[int, int]] = field(default_factory=list)
    """Drafts verified and drafts kept in each step that sampled."""

    @property
    def is_done(self) -> bool:
        return self.code != 0 or self.error is not None


class MiniScheduler:
    """Plans everything it has, one plan in flight, chunks of at most `chunk` prompt tokens."""

    def __init__(self, executor: Any, *, chunk: int = 1000) -> None:
        self.executor = executor
        self.capacity = executor.capacity
        self.chunk = chunk
        self.step = 0
        self.live: list[Live] = []
        self.logprobs: list[Any] = []
        self._rows = itertools.cycle(range(self.capacity.num_rows))
        self._blocks = list(range(self.capacity.num_blocks - 1, 0, -1))
        self._held: dict[int, list[int]] = {}
        self._freed: list[int] = []

    def add(
        self,
        prompt: Sequence[int],
        *,
        outputs: Sequence[int] = (),
        script: ReplayScript | None = None,
        **sampling: Any,
    ) -> Live:
        in_use = {one.row for one in self.live} | set(self._freed)
        row = next(r for r in self._rows if r not in in_use)
        one = Live(
            prompt=list(prompt), row=row, sampling=sampling, script=script, outputs=list(outputs)
        )
        self.live.append(one)
        return one

    def preempt(self, one: Live) -> None:
        """Take row and blocks away; the sequence starts again from its tokens in the next step."""
        self._free(one)
        one.row = self.add([]).row
        self.live.pop()
        self.live.append(one)
        one.computed, one.blocks, one.is_new = 0, 0, True

    def _free(self, one: Live) -> None:
        self.live.remove(one)
        self._freed.append(one.row)
        self._blocks.extend(self._held.pop(one.row, []))

    def run(self) -> None:
        while self.live:
            self.run_step()

    def run_step(self) -> StepResult:
        self.step += 1
        entries, new, chosen = {}, [], self.live[: self.capacity.max_num_seqs]
        for one in chosen:
            scheduled, most = self._schedule(one)
            needed = -(-most // self.capacity.block_size) - one.blocks
            blocks = tuple(self._blocks.pop() for _ in range(needed))
            self._held.setdefault(one.row, []).extend(blocks)
            one.blocks += needed
            if one.is_new:
                new.append(
                    make_sequence(
                        one.row, one.prompt, outputs=one.outputs, script=one.script, **one.sampling
                    )
                )
                one.is_new = False
            entries[one.row] = Entry(scheduled=scheduled, computed=one.computed, blocks=blocks)
        plan = make_plan(self.step, entries, new=new, freed=self._freed)
        self._freed = []
        result = self.executor.execute(plan, 0)
        assert result.failure is None
        self._take(chosen, entries, result)
        return result

    def _schedule(self, one: Live) -> tuple[int, int]:
        """Tokens to order, and positions that they and the drafts behind them may reach."""
        known = len(one.prompt) + len(one.outputs)
        num_drafts = self.capacity.num_speculative_tokens
        scheduled = min(self.chunk, known - one.computed)
        if one.computed + scheduled < known:
            return scheduled, one.computed + scheduled
        scheduled += num_drafts if one.outputs else 0
        most = one.computed + scheduled + max(0, num_drafts - 1)
        return scheduled, min(most, self.capacity.max_model_len)

    def _take(self, chosen: list[Live], entries: dict[int, Entry], result: StepResult) -> None:
        ids = result.sampled_token_ids.tolist()
        errors = {entry.row: entry.error for entry in result.row_failures}
        self.logprobs.append(result.logprobs)
        for index, one in enumerate(chosen):
            count = int(result.num_sampled_tokens[index])
            known = len(one.prompt) + len(one.outputs)
            one.outputs += ids[:count]
            del ids[:count]
            one.num_steps += 1
            one.computed = min(known, one.computed + entries[one.row].scheduled)
            if self.capacity.num_speculative_tokens:
                drafted, accepted = (
                    int(column[index])
                    for column in (result.num_drafted_tokens, result.num_accepted_tokens)
                )
                one.computed += accepted
                one.drafted += [(drafted, accepted)] if count else []
            one.code = int(result.finish_codes[index])
            one.error = errors.get(one.row)
            if one.is_done:
                self._free(one)
        assert not ids
