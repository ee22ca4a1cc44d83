"""Runs plans with a model: rows to tensors, forward, sampling, rows again.

Every method runs on the runner's thread, which owns the device.
"""

import time
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from services.worker.batch import Batch, BatchBuilder
from services.worker.commit import commit_step
from services.worker.contract import ActiveRows, begin_step
from services.worker.model.metadata import StepMetadata
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
from services.worker.sampler import sample
from services.worker.sampling_rows import SamplingRows
from shared.errors import FailureReason, RequestError

CachesT = TypeVar("CachesT")
CachesT_contra = TypeVar("CachesT_contra", contravariant=True)


class DecoderLike(Protocol[CachesT_contra]):
    """What the executor needs of a model."""

    def forward(self, token_ids: Tensor, step: StepMetadata, caches: CachesT_contra) -> Tensor:
        """[T] token ids to [T, E] hidden states; writes the caches at the step's slots."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] hidden states to [S, V] float32 logits."""
        ...


class ModelExecutor(Generic[CachesT]):
    """Runs plans with a decoder."""

    def __init__(
        self,
        decoder: DecoderLike[CachesT],
        caches: CachesT,
        capacity: Capacity,
        *,
        num_known_ids: int,
        device: torch.device,
        row_multiple: int,
    ) -> None:
        """`num_known_ids` bounds what can be sampled; `row_multiple` pads steps."""
        self.capacity = capacity
        self._decoder = decoder
        self._caches = caches
        self._table = RowTable(capacity)
        self._sampling = SamplingRows(capacity.num_rows, num_known_ids)
        self._builder = BatchBuilder(self._table, device, row_multiple=row_multiple)
        self._max_plans_in_flight = 1

    def start_epoch(self, max_plans_in_flight: int) -> None:
        """Free every row."""
        self._max_plans_in_flight = max_plans_in_flight
        self._table.reset()
        self._sampling.reset()

    def num_rows_in_use(self) -> int:
        """Rows that a scheduler holds."""
        return self._table.num_in_use()

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        """Run one plan.

        Raises:
            ContractError: The plan does not fit the rows.
        """
        started = time.perf_counter_ns()
        active = begin_step(plan, self._table, self._max_plans_in_flight, self._admit)
        runs, lengths = np.zeros((len(active.rows), 1), np.int64), np.zeros_like(active.rows)
        logprobs = None
        prepared = computed = started
        if len(active.rows):
            batch = self._builder.build(active)
            prepared = time.perf_counter_ns()
            logits = self._compute(batch)
            computed = time.perf_counter_ns()
            if logits is not None:
                logprobs = self._sample(logits, active, batch.sampling_entries, runs, lengths)
        result = commit_step(plan, self._table, active, runs, lengths, logprobs)
        for row in plan.freed_rows:
            self._sampling.free(row)
        timings = StepTimings(
            wait_us=wait_us,
            prepare_us=(prepared - started) // 1000,
            forward_us=(computed - prepared) // 1000,
            sample_us=(time.perf_counter_ns() - computed) // 1000,
        )
        return replace(result, timings=timings)

    def _admit(self, new: NewSequence) -> None:
        if not self._table.admit(new):
            return
        if new.replay is not None:
            self._table.fail(new.row, _no_replay())
            return
        try:
            self._sampling.admit(new)
        except RequestError as error:
            self._table.fail(new.row, error)

    @torch.inference_mode()
    def _compute(self, batch: Batch) -> Tensor | None:
        """Logits of the rows that sample, None when there is none."""
        hidden = self._decoder.forward(batch.token_ids, batch.metadata, self._caches)
        count = len(batch.sampling_entries)
        if not count:
            return None
        if batch.sampling_positions is not None:
            hidden = hidden[batch.sampling_positions]
        return self._decoder.compute_logits(hidden)[:count]

    def _sample(
        self, logits: Tensor, active: ActiveRows, entries: Ints, runs: Ints, lengths: Ints
    ) -> LogprobColumns | None:
        """Fill in one token for each entry that samples; fail the rows with broken numbers."""
        table = self._table
        rows = active.rows[entries]
        num_outputs = table.num_tokens[rows] - table.num_prompt[rows]
        sampled = sample(logits, self._sampling, rows, num_outputs, table.num_logprobs[rows])
        runs[entries, 0] = sampled.tokens
        lengths[entries] = sampled.is_finite
        if not sampled.is_finite.all():
            for row in rows[~sampled.is_finite].tolist():
                table.fail(row, _not_finite())
        self._sampling.note(rows[sampled.is_finite], sampled.tokens[sampled.is_finite])
        return sampled.logprobs


def _not_finite() -> RequestError:
    return RequestError(
        FailureReason.NUMERICAL_ERROR, "the model's numbers for this sequence are not finite"
    )


def _no_replay() -> RequestError:
    return RequestError(
        FailureReason.FEATURE_DISABLED,
        "replay: this worker runs a model and takes no script",
        field="replay",
    )
