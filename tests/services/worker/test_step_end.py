"""The plain end of a step; through whole executors in test_model_executor.py."""

import math

import numpy as np
import torch

from services.worker.batch import BatchBuilder
from services.worker.contract import begin_step
from services.worker.plan import StepResult
from services.worker.rows import ENDED, RowTable
from services.worker.sampling_rows import SamplingRows
from services.worker.step_end import Computed, SampleEnd
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence


def end(logits: torch.Tensor | None, *scheduled: int) -> tuple[StepResult, RowTable]:
    """One step of rows with three prompt tokens each."""
    limits = make_capacity()
    table, sampling = RowTable(limits), SamplingRows(limits.num_rows, 10)
    for row in range(len(scheduled)):
        new = make_sequence(row, [1, 2, 3], temperature=0.0, frequency_penalty=0.5)
        table.admit(new)
        sampling.admit(new)
    entries = {r: Entry(scheduled=n, blocks=(r + 1,)) for r, n in enumerate(scheduled)}
    plan = make_plan(1, entries)
    active = begin_step(plan, table, 1, lambda new: None)
    batch = BatchBuilder(table, torch.device("cpu"), row_multiple=1).build(active)
    computed = Computed(batch=batch, hidden=torch.zeros(active.num_tokens, 1), logits=logits)
    return SampleEnd(table, sampling).end(plan, active, computed), table


def test_rows_with_all_their_tokens_get_one_each() -> None:
    logits = torch.eye(10)[[7, 4]]
    result, table = end(logits, 3, 2, 3)
    assert result.num_sampled_tokens.tolist() == [1, 0, 1]
    assert result.sampled_token_ids.tolist() == [7, 4]
    assert table.num_tokens[:3].tolist() == [4, 3, 4]
    assert len(result.num_drafted_tokens) == 0


def test_a_step_without_logits_commits_its_chunks() -> None:
    result, table = end(None, 2)
    assert result.num_sampled_tokens.tolist() == [0]
    assert table.num_computed[0] == 2


def test_broken_numbers_fail_their_row() -> None:
    logits = torch.eye(10)[[7, 4]]
    logits[0, 3] = math.nan
    result, table = end(logits, 3, 3)
    assert [failure.row for failure in result.row_failures] == [0]
    assert result.sampled_token_ids.tolist() == [4]
    assert np.flatnonzero(table.state == ENDED).tolist() == [0]
