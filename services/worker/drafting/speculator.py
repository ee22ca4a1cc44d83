"""The second half of a step in a worker with drafts: verify and commit, then propose the next ones.

Proposing waits for `finish`, so that the result is on its way in the meantime.
"""

import time
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from services.worker.batch import Batch
from services.worker.commit import commit_step
from services.worker.contract import ActiveRows
from services.worker.drafting.proposer import Proposer
from services.worker.drafting.verification import Verification
from services.worker.logprobs import measure
from services.worker.plan import Ints, LogprobColumns, StepPlan, StepResult, StepTimings
from services.worker.rows import RowTable
from services.worker.sampling_rows import SamplingRows
from services.worker.step_end import Computed
from services.worker.tokens import OwnTokens, TokenSource

CachesT = TypeVar("CachesT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Verified:
    """What the active rows of a step get."""

    runs: Ints
    """[A, N] tokens."""
    lengths: Ints
    """[A] tokens of each run."""
    accepted: Ints
    """[A] drafts that each run begins with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pending:
    """A step behind which drafts are to be proposed; valid until the next one is built."""

    active: ActiveRows
    batch: Batch
    hidden: Tensor
    accepted: Ints


class Speculator(Generic[CachesT]):
    """Ends steps with runs of tokens."""

    def __init__(
        self,
        proposer: Proposer[CachesT],
        table: RowTable,
        sampling: SamplingRows,
        tokens: TokenSource | None = None,
    ) -> None:
        """Rows and how they are sampled; by default this rank does it."""
        self._tokens: TokenSource = tokens or OwnTokens()
        self._proposer = proposer
        self._table = table
        self._sampling = sampling
        self._pending: _Pending | None = None
        self._draft_us = 0

    def end(self, plan: StepPlan, active: ActiveRows, computed: Computed | None) -> StepResult:
        """Verify and commit."""
        assert self._pending is None, "drafts of the last step are missing"
        if computed is None or not computed.is_sampling:
            verified = _nothing(len(active.rows))
            result = self._commit(plan, active, verified)
        else:
            entries = computed.batch.sampling_entries
            verification = Verification(self._table, active, entries)
            verified, targets = self._verify(verification, computed.logits, len(active.rows))
            result = self._commit(plan, active, verified)
            kept = result.num_sampled_tokens[active.entries[entries]]
            self._sampling.note(np.repeat(verification.rows, kept), result.sampled_token_ids)
            logprobs = self._measure(verification, computed.logits, targets, kept)
            result = replace(result, logprobs=logprobs)
        if computed is not None:
            self._pending = _Pending(
                active=active,
                batch=computed.batch,
                hidden=computed.hidden,
                accepted=verified.accepted,
            )
        result = replace(result, timings=StepTimings(draft_us=self._draft_us))
        self._draft_us = 0
        return result

    def finish(self) -> None:
        """Propose the drafts of the next step; what fails can be tried again."""
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter_ns()
        self._proposer.propose(pending.hidden, pending.batch, pending.active, pending.accepted)
        self._draft_us = (time.perf_counter_ns() - started) // 1000
        self._pending = None

    def reset(self) -> None:
        """No row is left that could get drafts."""
        self._pending = None

    def _verify(
        self, verification: Verification, logits: Tensor | None, num_active: int
    ) -> tuple[_Verified, Ints]:
        """Runs of the active rows, and the targets of all logits; broken rows are failed."""
        rows = verification.rows_of_logits
        sampled = self._tokens.sample(
            logits,
            self._sampling,
            rows,
            verification.num_outputs,
            np.full(len(rows), -1),  # measured later, where kept
            verification.drafts_before,
        )
        runs = verification.judge(sampled.tokens, sampled.is_usable)
        for place in runs.is_broken.nonzero()[0].tolist():
            is_its_own = verification.owners == place
            first = int((is_its_own & ~sampled.is_usable).argmax())
            self._table.fail(int(verification.rows[place]), sampled.failure(first))
        verified = _nothing(num_active, runs.tokens.shape[1])
        verified.runs[verification.entries] = runs.tokens
        verified.lengths[verification.entries] = runs.lengths
        verified.accepted[verification.entries] = runs.accepted
        return verified, sampled.tokens

    def _commit(self, plan: StepPlan, active: ActiveRows, verified: _Verified) -> StepResult:
        return commit_step(
            plan,
            self._table,
            active,
            verified.runs,
            verified.lengths,
            logprobs=None,
            accepted=verified.accepted,
        )

    def _measure(
        self, verification: Verification, logits: Tensor | None, targets: Ints, kept: Ints
    ) -> LogprobColumns | None:
        """Log-probabilities of the tokens that were kept, for the rows that asked."""
        num_logprobs = self._table.num_logprobs[verification.rows]
        places = verification.kept_places(kept, num_logprobs)
        if not len(places):
            return None
        num_top = num_logprobs[verification.owners[places]]

        @torch.inference_mode()
        def make() -> LogprobColumns:
            assert logits is not None
            at = torch.from_numpy(places).to(logits.device)
            tokens = torch.from_numpy(targets[places]).to(logits.device)
            return measure(logits[:, : self._sampling.vocab_size][at], tokens, num_top)

        return self._tokens.measure(make)


def _nothing(num_active: int, width: int = 1) -> _Verified:
    return _Verified(
        runs=np.zeros((num_active, width), np.int64),
        lengths=np.zeros(num_active, np.int64),
        accepted=np.zeros(num_active, np.int64),
    )
