"""The second half of a step: logits to tokens, tokens into the rows, the result out."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from services.worker.batch import Batch
from services.worker.commit import commit_step
from services.worker.contract import ActiveRows
from services.worker.plan import Ints, LogprobColumns, RowPromptLogprobs, StepPlan, StepResult
from services.worker.rows import RowTable
from services.worker.sampling_rows import SamplingRows
from services.worker.tokens import OwnTokens, TokenSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What the model made of a step."""

    batch: Batch
    hidden: Tensor
    """[T, E] states of all tokens, padding included."""
    logits: Tensor | None
    """Of the places that are sampled; None when there is none, or the head is elsewhere."""
    prompt_logprobs: tuple[RowPromptLogprobs, ...] = ()

    @property
    def is_sampling(self) -> bool:
        """Whether some row gets a token."""
        return len(self.batch.sampling_entries) > 0


class StepEnd(Protocol):
    """Ends steps."""

    def end(self, plan: StepPlan, active: ActiveRows, computed: Computed | None) -> StepResult:
        """Bring a step to its result; `computed` is None where no row had anything to compute."""
        ...

    def finish(self) -> None:
        """Do what the next step needs and the last result does not; nothing if it is done."""
        ...

    def reset(self) -> None:
        """Forget the last step: its rows are free."""
        ...


class SampleEnd:
    """One token for every row whose known tokens are all computed."""

    def __init__(
        self, table: RowTable, sampling: SamplingRows, tokens: TokenSource | None = None
    ) -> None:
        """Rows and how they are sampled; by default this rank does it."""
        self._table = table
        self._sampling = sampling
        self._tokens: TokenSource = tokens or OwnTokens()

    def end(self, plan: StepPlan, active: ActiveRows, computed: Computed | None) -> StepResult:
        """Sample and commit."""
        runs, lengths = np.zeros((len(active.rows), 1), np.int64), np.zeros_like(active.rows)
        logprobs = None
        if computed is not None and computed.is_sampling:
            entries = computed.batch.sampling_entries
            logprobs = self._sample(computed.logits, active, entries, runs, lengths)
        return commit_step(plan, self._table, active, runs, lengths, logprobs)

    def finish(self) -> None:
        """Everything is done."""

    def reset(self) -> None:
        """There is nothing to forget."""

    def _sample(
        self, logits: Tensor | None, active: ActiveRows, entries: Ints, runs: Ints, lengths: Ints
    ) -> LogprobColumns | None:
        """Fill in one token for each entry that samples; fail the rows with broken numbers."""
        table = self._table
        rows = active.rows[entries]
        num_outputs = table.num_tokens[rows] - table.num_prompt[rows]
        sampled = self._tokens.sample(
            logits, self._sampling, rows, num_outputs, table.num_logprobs[rows]
        )
        runs[entries, 0] = sampled.tokens
        is_usable = sampled.is_usable
        lengths[entries] = is_usable
        if not is_usable.all():
            for place in (~is_usable).nonzero()[0].tolist():
                table.fail(int(rows[place]), sampled.failure(place))
        self._sampling.note(rows[is_usable], sampled.tokens[is_usable])
        return sampled.logprobs
