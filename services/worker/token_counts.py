"""How often a sequence has produced each token, kept up to date token by token."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.worker.plan import Ids, Ints

_INITIAL_SIZE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """Distinct tokens, and parallel to them how often each occurs in the output."""

    ids: Ints
    counts: Ints


class TokenCounts:
    """The distinct tokens of one sequence with their number of occurrences in the output.

    Sparse: a sequence has few distinct tokens next to the vocabulary, and a new token costs one
    look-up instead of a pass over prompt and output.
    """

    def __init__(self, prompt: Ids, output: Ids) -> None:
        """Tokens of the prompt are listed too, with 0 occurrences; pass none to leave them out."""
        distinct = np.unique(np.concatenate([prompt, output])).astype(np.int64)
        self._size = len(distinct)
        capacity = max(_INITIAL_SIZE, 2 * self._size)
        self._ids = np.zeros(capacity, np.int64)
        self._counts = np.zeros(capacity, np.int64)
        self._ids[: self._size] = distinct
        np.add.at(self._counts, np.searchsorted(distinct, output.astype(np.int64)), 1)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> Ints:
        """Distinct tokens; a view that `add` may outdate."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ints:
        """Occurrences in the output, parallel to `ids`."""
        return self._counts[: self._size]

    def after(self, tokens: Iterable[int]) -> Occurrences:
        """What the counts would be with more tokens in the output."""
        counts = self.counts.copy()
        more: dict[int, int] = {}
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                more[token] = more.get(token, 0) + 1
            else:
                counts[place] += 1
        if not more:
            return Occurrences(self.ids, counts)
        ids = np.concatenate([self.ids, np.fromiter(more, np.int64)])
        return Occurrences(ids, np.concatenate([counts, np.fromiter(more.values(), np.int64)]))

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._append(token)
        self._counts[place] += 1

    def _append(self, token: int) -> int:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token
        self._size += 1
        return self._size - 1
