"""Whether a plan may be run: its columns against the limits and against the rows.

Every check raises `ContractError`: such a plan means that scheduler and worker no longer agree, and
running it could write into another sequence's cache. What is wrong with one sequence only is the
row's own failure and is found in `rows.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.plan import Capacity, ContractError, Ints, NewSequence, StepPlan
from services.worker.rows import FREE, RUNNING, RowTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActiveRows:
    """The rows of a plan that compute something, in plan order; ended rows are left out."""

    entries: Ints
    """Their places in the plan's columns."""
    rows: Ints
    num_scheduled: Ints
    """Tokens to compute: known ones, then drafts."""
    num_computed: Ints
    """The worker's own count, which may be ahead of the plan's."""
    is_sampling: NDArray[np.bool_]
    """Whether the chunk reaches the end of the known tokens, so that a new one follows."""
    num_drafts: Ints | None = None
    """How many of them are drafts; None in a worker without drafts."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return int(self.num_scheduled.sum())


def begin_step(
    plan: StepPlan,
    table: RowTable,
    max_plans_in_flight: int,
    admit: Callable[[NewSequence], None],
) -> ActiveRows:
    """Check a plan, take in its new sequences and blocks, and say what is to be computed.

    `admit` puts a new sequence into its row, or fails that row.
    """
    _check_columns(plan, table.capacity)
    for new in plan.new_sequences:
        admit(new)
    _check_freed(plan, table)
    states = table.state[plan.rows]
    _require_all(states != FREE, plan.rows, "was never described")
    _append_blocks(plan, table)
    entries = (states == RUNNING).nonzero()[0]
    if len(entries) == len(plan.rows):
        rows, num_scheduled, echoed = plan.rows, plan.num_scheduled_tokens, plan.num_computed_tokens
    else:
        rows = plan.rows[entries]
        num_scheduled = plan.num_scheduled_tokens[entries]
        echoed = plan.num_computed_tokens[entries]
    num_computed = table.num_computed[rows]
    _check_progress(plan.step, rows, echoed, num_computed, table, max_plans_in_flight)
    known = table.num_tokens[rows]
    covered = table.covered(rows)
    num_drafts = None
    if table.capacity.num_speculative_tokens:
        num_scheduled, num_drafts = _add_drafts(num_scheduled, num_computed, rows, table)
        after = num_computed + num_scheduled - num_drafts
    else:
        after = num_computed + num_scheduled
        _require_all(after <= known, rows, "has fewer tokens left than are scheduled")
    _require_all(after <= covered, rows, "has too few blocks for its tokens")
    return ActiveRows(
        entries=entries,
        rows=rows,
        num_scheduled=num_scheduled,
        num_computed=num_computed,
        is_sampling=after == known,
        num_drafts=num_drafts,
    )


def _add_drafts(
    num_scheduled: Ints, num_computed: Ints, rows: Ints, table: RowTable
) -> tuple[Ints, Ints]:
    """Tokens to compute of each row, and how many of them are drafts.

    A plan says how many tokens a row may take at most. Behind its known tokens that leaves room for
    drafts: as many as there are, and only where the row has blocks.
    """
    known = table.num_tokens[rows]
    missing = known - num_computed
    room = num_scheduled - missing
    is_possible = room <= table.capacity.num_speculative_tokens
    _require_all(is_possible, rows, "has fewer tokens left than are scheduled")
    num_drafts = np.minimum(np.minimum(table.num_drafts[rows], room), table.covered(rows) - known)
    np.maximum(num_drafts, 0, out=num_drafts)
    return np.minimum(num_scheduled, missing) + num_drafts, num_drafts


def _check_columns(plan: StepPlan, limits: Capacity) -> None:
    rows = plan.rows
    if len(rows) > limits.max_num_seqs:
        raise ContractError(f"{len(rows)} sequences are more than max_num_seqs")
    _require_all(rows < limits.num_rows, rows, "is not below num_rows")
    if len(rows) > 1:
        ordered = np.sort(rows)
        _require_all(ordered[1:] != ordered[:-1], ordered[1:], "is named twice")
    _require_all(plan.num_scheduled_tokens >= 1, rows, "has no token to compute")
    num_tokens = int(plan.num_scheduled_tokens.sum())
    if num_tokens > limits.max_num_batched_tokens:
        raise ContractError(f"{num_tokens} tokens are more than max_num_batched_tokens")
    if int(plan.num_new_blocks.sum()) != len(plan.new_blocks):
        raise ContractError("num_new_blocks and new_blocks do not agree")
    if len(plan.new_blocks):
        low, high = int(plan.new_blocks.min()), int(plan.new_blocks.max())
        if low == 0 or high >= limits.num_blocks:
            raise ContractError(f"block ids {low}..{high} leave 1..{limits.num_blocks - 1}")


def _check_freed(plan: StepPlan, table: RowTable) -> None:
    if len(set(plan.freed_rows)) != len(plan.freed_rows):
        raise ContractError("a row is freed twice")
    for row in plan.freed_rows:
        if row >= table.capacity.num_rows or table.state[row] == FREE:
            raise ContractError(f"freed row {row} is not in use")


def _append_blocks(plan: StepPlan, table: RowTable) -> None:
    start = 0
    for entry in plan.num_new_blocks.nonzero()[0].tolist():
        row, count = plan.rows[entry], int(plan.num_new_blocks[entry])
        used = int(table.num_blocks[row])
        if used + count > table.block_table.shape[1]:
            raise ContractError(f"row {row} gets more blocks than max_model_len needs")
        table.block_table[row, used : used + count] = plan.new_blocks[start : start + count]
        table.num_blocks[row] = used + count
        start += count


def _check_progress(
    step: int,
    rows: Ints,
    echoed: Ints,
    num_computed: Ints,
    table: RowTable,
    max_plans_in_flight: int,
) -> None:
    """The plan's count must be one the scheduler can have had.

    With one plan in flight that is ours. With two, the plan may have been made before the result
    of the step before it: then the count from before that step is right as well, and the one after
    it without the drafts that were kept.
    """
    is_right = echoed == num_computed
    if max_plans_in_flight > 1:
        was_named = table.last_step[rows] == step - 1
        least = num_computed - table.num_accepted[rows]
        is_right |= was_named & ((echoed == table.last_computed[rows]) | (echoed == least))
    _require_all(is_right, rows, "has another number of computed tokens here")


def _require_all(holds: NDArray[np.bool_], rows: Ints, complaint: str) -> None:
    if not holds.all():
        raise ContractError(f"row {rows[np.argmin(holds)]} {complaint}")
