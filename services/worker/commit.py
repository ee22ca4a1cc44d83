"""The end of a step: new tokens go into the rows, the result's columns come out."""

import numpy as np

from services.worker.contract import ActiveRows
from services.worker.finish import cut_runs
from services.worker.plan import (
    FinishCode,
    Ints,
    LogprobColumns,
    RowFailure,
    StepPlan,
    StepResult,
)
from services.worker.rows import ENDED, RowTable

_NO_COLUMN: Ints = np.empty(0, np.int64)


def commit_step(
    plan: StepPlan,
    table: RowTable,
    active: ActiveRows,
    runs: Ints,
    lengths: Ints,
    logprobs: LogprobColumns | None,
    accepted: Ints | None = None,
) -> StepResult:
    """Write what a step produced into the rows, describe it, and free what the plan gives back.

    Args:
        plan: The plan of the step.
        table: The rows, as `begin_step` left them, failures of this step included.
        active: What was computed.
        runs: [A, N] tokens sampled for each active row.
        lengths: [A] how many; 0 where nothing was sampled or the row failed.
        logprobs: Of the sampled tokens, cut already.
        accepted: [A] drafts that the runs begin with; None in a worker without drafts.
    """
    rows = active.rows
    table.last_computed[rows] = active.num_computed
    table.last_step[plan.rows] = plan.step
    table.num_computed[rows] = active.num_computed + active.num_scheduled
    if accepted is not None and active.num_drafts is not None:
        # Caches of rejected drafts are written again: their positions come once more.
        table.num_computed[rows] -= active.num_drafts - accepted
        table.num_accepted[rows] = accepted
        table.num_drafts[rows] = 0
    has_new = lengths.nonzero()[0]
    num_sampled = np.zeros(len(plan.rows), np.int64)
    sampled = np.empty(0, np.int64)
    if len(has_new):
        kept, sampled = _append_tokens(table, rows[has_new], runs[has_new], lengths[has_new])
        num_sampled[active.entries[has_new]] = kept
    drafted, confirmed = _draft_columns(plan, active, accepted, num_sampled)
    result = StepResult(
        step=plan.step,
        rows=plan.rows,
        num_computed_tokens=plan.num_computed_tokens,
        num_sampled_tokens=num_sampled,
        sampled_token_ids=sampled,
        num_drafted_tokens=drafted,
        num_accepted_tokens=confirmed,
        finish_codes=table.finish_code[plan.rows],
        logprobs=logprobs,
        row_failures=_failures(plan, table),
    )
    for row in plan.freed_rows:
        table.free(row)
    return result


def _append_tokens(table: RowTable, rows: Ints, runs: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    kept, codes = cut_runs(table, rows, runs, lengths)
    starts = table.num_tokens[rows]
    if runs.shape[1] == 1:
        table.tokens[rows, starts] = runs[:, 0]
        sampled = runs[:, 0]
    else:
        place = np.arange(runs.shape[1])
        is_kept = place < kept[:, None]
        sampled = runs[is_kept]
        row_of, column_of = np.nonzero(is_kept)
        table.tokens[rows[row_of], starts[row_of] + column_of] = sampled
    table.num_tokens[rows] = starts + kept
    table.finish_code[rows] = codes
    table.state[rows[codes != FinishCode.GOES_ON]] = ENDED
    return kept, sampled


def _draft_columns(
    plan: StepPlan, active: ActiveRows, accepted: Ints | None, num_sampled: Ints
) -> tuple[Ints, Ints]:
    """Drafts verified and drafts kept of the plan's rows; empty in a worker without drafts."""
    if accepted is None or active.num_drafts is None:
        return _NO_COLUMN, _NO_COLUMN
    drafted, confirmed = np.zeros_like(plan.rows), np.zeros_like(plan.rows)
    drafted[active.entries] = active.num_drafts
    # A run may have been cut among its drafts.
    confirmed[active.entries] = np.minimum(accepted, num_sampled[active.entries])
    return drafted, confirmed


def _failures(plan: StepPlan, table: RowTable) -> tuple[RowFailure, ...]:
    """Failed rows that the plan names or describes."""
    if not table.failures:
        return ()
    named = dict.fromkeys(plan.rows.tolist()) | {new.row: None for new in plan.new_sequences}
    return tuple(
        RowFailure(row=row, error=table.failures[row]) for row in named if row in table.failures
    )
