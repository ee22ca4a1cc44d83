"""Which tokens a row may have next, by what its request forbids: ids, bad words, a long thought.

The law: something is always left to sample. A spent thinking budget forces the token that ends the
block, whatever else is said; bad words yield where nothing else is allowed; and the caller may not
mask the ends of a row where they are all that is left.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.worker.plan import Ids, Ints
from shared.sampling import SamplingSpec, ThinkingBudget

_NOTHING = float("-inf")


class TokenLimits:
    """The limits of one row, and as much of its output as they ask about."""

    __slots__ = (
        "_allowed",
        "_budget",
        "_is_thinking",
        "_num_outputs",
        "_recent",
        "_runs",
        "_vocab",
    )

    def __init__(self, spec: SamplingSpec, vocab_size: int) -> None:
        """Start with an empty output; ids past the vocabulary can never come and are dropped."""
        allowed = [token for token in spec.allowed_token_ids if token < vocab_size]
        self._vocab = vocab_size
        self._allowed: Ints | None = np.unique(allowed).astype(np.int64) if allowed else None
        self._runs = [run for run in spec.bad_words if max(run) < vocab_size]
        self._budget: ThinkingBudget | None = spec.thinking_budget
        self._is_thinking = self._budget is not None
        self._num_outputs = 0
        self._recent: list[int] = []

    @classmethod
    def of(cls, spec: SamplingSpec, outputs: Ids, vocab_size: int) -> "TokenLimits | None":
        """The limits of a new or resumed sequence, None when it has none."""
        if not (spec.allowed_token_ids or spec.bad_words or spec.thinking_budget):
            return None
        limits = cls(spec, vocab_size)
        for token in outputs.tolist():
            limits.add(token)
        return limits

    def add(self, token: int) -> None:
        """Take note of an output token."""
        self._num_outputs += 1
        if self._budget is not None and token in self._budget.end_ids:
            self._is_thinking = False
        if self._runs:
            self._recent.append(token)
            longest = max(map(len, self._runs)) - 1
            del self._recent[: max(0, len(self._recent) - longest)]

    def apply(self, logits: Tensor, ahead: Sequence[int], ends: Ints) -> bool:
        """Make impossible what may not come next.

        Args:
            logits: [V] of the row, changed in place.
            ahead: Drafts that the row takes for granted behind its output.
            ends: Ids that the caller would mask afterwards.

        Returns:
            Whether the caller has to leave the ends alone.
        """
        if self._must_end_thought(ahead):
            assert self._budget is not None
            end = self._budget.end_token_id
            kept = logits[end].clone()
            logits.fill_(_NOTHING)
            logits[end] = kept if torch.isfinite(kept) else 0.0
            return True
        banned = self._banned(ahead)
        if self._allowed is None:
            # A bad word for every id of the vocabulary would leave nothing.
            if len(banned) < self._vocab:
                logits[_at(banned, logits)] = _NOTHING
            return len(np.union1d(banned, ends)) >= self._vocab
        left = np.setdiff1d(self._allowed, banned)
        left = left if len(left) else self._allowed
        at = _at(left, logits)
        kept = logits[at].clone()
        logits.fill_(_NOTHING)
        logits[at] = kept
        return not len(np.setdiff1d(left, ends))

    def _must_end_thought(self, ahead: Sequence[int]) -> bool:
        budget = self._budget
        if budget is None or not self._is_thinking:
            return False
        is_spent = self._num_outputs + len(ahead) >= budget.max_tokens
        return is_spent and not set(ahead) & set(budget.end_ids)

    def _banned(self, ahead: Sequence[int]) -> Ints:
        """Last ids of the bad words whose beginning stands at the end of the output."""
        behind = [*self._recent, *ahead]
        found = [
            run[-1]
            for run in self._runs
            if len(run) == 1 or tuple(behind[-(len(run) - 1) :]) == run[:-1]
        ]
        return np.unique(np.array(found, np.int64))


def _at(ids: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(ids).to(like.device)
