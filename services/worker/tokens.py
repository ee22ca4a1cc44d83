"""Where a step's tokens come from: the rank that samples them, here or elsewhere.

Rows are mirrored on all ranks of a replica, so every rank must write the same tokens. One of them
samples; the others are told. Log-probabilities go to the rank that answers alone.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from services.worker.plan import Ints, LogprobColumns
from services.worker.sampler import Sampled, sample
from services.worker.sampling_rows import SamplingRows


class TokenSource(Protocol):
    """Gives tokens for the rows of a step."""

    @property
    def is_sampling(self) -> bool:
        """Whether it is this rank that samples, and needs what masks are made of."""
        ...

    def sample(
        self,
        logits: Tensor | None,
        settings: SamplingRows,
        rows: Ints,
        num_outputs: Ints,
        num_logprobs: Ints,
        drafts_of: Callable[[int], Ints] | None = None,
    ) -> Sampled:
        """One token for each row, as `sampler.sample`; `logits` where the head is."""
        ...

    def measure(self, make: Callable[[], LogprobColumns]) -> LogprobColumns | None:
        """Columns made where the logits are, for the rank that answers; None elsewhere."""
        ...

    def share(self, drafts: Ints) -> Ints:
        """[passes, rows] drafts as the rank that samples has them."""
        ...


class OwnTokens:
    """This rank samples for itself."""

    is_sampling = True

    def sample(
        self,
        logits: Tensor | None,
        settings: SamplingRows,
        rows: Ints,
        num_outputs: Ints,
        num_logprobs: Ints,
        drafts_of: Callable[[int], Ints] | None = None,
    ) -> Sampled:
        """Sample."""
        assert logits is not None
        return sample(logits, settings, rows, num_outputs, num_logprobs, drafts_of)

    def measure(self, make: Callable[[], LogprobColumns]) -> LogprobColumns | None:
        """Measure."""
        return make()

    def share(self, drafts: Ints) -> Ints:
        """They are this rank's."""
        return drafts
