"""A worker without a model: every sequence brings the tokens that it is going to produce.

It keeps the whole contract of a real worker (rows, blocks, counts, ends) and needs no torch, so it
serves tests of the mesh, load tests of everything but the model, and reports of users.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.worker.commit import commit_step
from services.worker.contract import ActiveRows, begin_step
from services.worker.plan import (
    Capacity,
    Ints,
    LogprobColumns,
    NewSequence,
    StepPlan,
    StepResult,
    StepTimings,
)
from services.worker.rows import RowTable
from shared.errors import FailureReason, RequestError
from shared.sampling import ReplayScript

# Bounds the width of a step's token matrix.
_MAX_TOKENS_PER_STEP = 1024


@dataclass(slots=True)
class _Playback:
    """Where one row is in its script. After the script only the primary eos comes."""

    script: ReplayScript
    eos: int
    position: int
    turn: int

    def take(self) -> Sequence[int]:
        """The tokens of the row's next step."""
        sizes = self.script.tokens_per_step
        size = sizes[self.turn % len(sizes)]
        run = self.script.token_ids[self.position : self.position + size]
        self.position += size
        self.turn += 1
        return run if len(run) == size else (*run, self.eos)


class ReplayExecutor:
    """Runs plans by reading scripts."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._table = RowTable(capacity)
        self._playbacks: dict[int, _Playback] = {}
        self._max_plans_in_flight = 1

    def start_epoch(self, max_plans_in_flight: int) -> None:
        """Free every row."""
        self._max_plans_in_flight = max_plans_in_flight
        self._table.reset()
        self._playbacks.clear()

    def num_rows_in_use(self) -> int:
        """Rows that a scheduler holds."""
        return self._table.num_in_use()

    def take_memory(self) -> None:
        """Blocks of a script hold nothing."""

    def finish_step(self) -> None:
        """A script has nothing to prepare."""

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        """Run one plan.

        Raises:
            ContractError: The plan does not fit the rows.
        """
        start = time.perf_counter_ns()
        active = begin_step(plan, self._table, self._max_plans_in_flight, self._admit)
        prepared = time.perf_counter_ns()
        runs, lengths = self._take_runs(active)
        result = commit_step(plan, self._table, active, runs, lengths, None)
        for row in plan.freed_rows:
            self._playbacks.pop(row, None)
        timings = StepTimings(
            wait_us=wait_us,
            prepare_us=(prepared - start) // 1000,
            sample_us=(time.perf_counter_ns() - prepared) // 1000,
        )
        return replace(result, logprobs=self._certain(result), timings=timings)

    def _admit(self, new: NewSequence) -> None:
        if not self._table.admit(new):
            return
        try:
            self._playbacks[new.row] = _open_script(new, self.capacity.vocab_size)
        except RequestError as error:
            self._table.fail(new.row, error)

    def _take_runs(self, active: ActiveRows) -> tuple[Ints, Ints]:
        taken = [
            self._playbacks[row].take() if is_sampling else ()
            for row, is_sampling in zip(
                active.rows.tolist(), active.is_sampling.tolist(), strict=True
            )
        ]
        lengths = np.fromiter(map(len, taken), np.int64, len(taken))
        runs = np.zeros((len(taken), max(1, lengths.max(initial=0))), np.int64)
        for entry, run in enumerate(taken):
            runs[entry, : len(run)] = run
        return runs, lengths

    def _certain(self, result: StepResult) -> LogprobColumns | None:
        """A script is certain: log-probability 0, rank 1, the token as its own alternative."""
        wanted = np.repeat(self._table.num_logprobs[result.rows], result.num_sampled_tokens)
        asked = wanted >= 0
        if not asked.any():
            return None
        with_top = wanted[asked] > 0
        ids = result.sampled_token_ids[asked].astype(np.uint32)
        return LogprobColumns(
            sampled_logprobs=np.zeros(len(ids), np.float32),
            sampled_ranks=np.ones(len(ids), np.uint32),
            num_top_logprobs=with_top.astype(np.int64),
            top_token_ids=ids[with_top],
            top_logprobs=np.zeros(int(with_top.sum()), np.float32),
        )


def _open_script(new: NewSequence, vocab_size: int) -> _Playback:
    """Find the place of a new or resumed sequence in its script."""
    script, eos_ids = new.replay, new.sampling.eos_token_ids
    if script is None:
        raise _refused("replay", "this worker only replays, and the sequence has no script")
    if not eos_ids:
        raise _refused("eos_token_ids", "a replay ends with the primary eos, and there is none")
    if script.token_ids and max(script.token_ids) >= vocab_size:
        raise _refused("replay.token_ids", f"an id is not below {vocab_size}")
    sizes = script.tokens_per_step
    if not all(1 <= size <= _MAX_TOKENS_PER_STEP for size in sizes):
        raise _refused("replay.tokens_per_step", f"must be 1 to {_MAX_TOKENS_PER_STEP}")
    num_output = len(new.output_token_ids)
    return _Playback(
        script=script, eos=eos_ids[0], position=num_output, turn=_turn_at(sizes, num_output)
    )


def _turn_at(sizes: Sequence[int], position: int) -> int:
    """The turn at which a token of this position is emitted."""
    rounds, rest = divmod(position, sum(sizes))
    turn = rounds * len(sizes)
    for size in sizes:
        if rest < size:
            break
        rest -= size
        turn += 1
    return turn


def _refused(field: str, message: str) -> RequestError:
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field}: {message}", field=field)
