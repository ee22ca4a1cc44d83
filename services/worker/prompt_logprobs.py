"""Log-probabilities of prompt tokens, for the few sequences that ask.

A step has the hidden states of every prompt token it computes; each tells how likely the token
behind it was. The head runs over them in tiles, so that a long chunk needs no more memory than a
few rows.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.batch import Batch
from services.worker.logprobs import measure
from services.worker.plan import Ints, LogprobColumns, NewSequence, RowPromptLogprobs
from services.worker.rows import RowTable
from services.worker.tokens import TokenSource

# 40 MB of logits with the vocabulary of GLM-5.2. A multiple of 4: rows of such products do not
# depend on their number.
TILE_ROWS = 64

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wanted:
    """Tokens of a step behind which a prompt goes on that is measured."""

    places: Ints
    """[N] in the step."""
    rows: Ints
    positions: Ints
    """[N] of the tokens that are measured: one behind each of the places."""


class PromptLogprobs:
    """Which rows want their prompts measured, and the measuring."""

    def __init__(self, table: RowTable, tokens: TokenSource, num_known_ids: int) -> None:
        """Nobody wants it yet."""
        self._table = table
        self._tokens = tokens
        self._num_known_ids = num_known_ids
        self._num_top = np.full(len(table.num_prompt), -1, np.int64)
        self._is_wanted = False

    def admit(self, new: NewSequence) -> None:
        """Take note of what a new sequence wants."""
        asked = new.sampling.num_prompt_logprobs
        self.free(new.row)
        if asked is not None:
            self._num_top[new.row] = asked
            self._is_wanted = True

    def free(self, row: int) -> None:
        """Forget a row."""
        if self._is_wanted:
            self._num_top[row] = -1
            self._is_wanted = bool((self._num_top >= 0).any())

    def reads(self, batch: Batch) -> bool:
        """Whether a prompt in a step is measured: the states of its tokens are needed."""
        return self._is_wanted and self._choose(batch) is not None

    def measure(
        self, batch: Batch, hidden: Tensor, head: Head | None
    ) -> tuple[RowPromptLogprobs, ...]:
        """What the prompts in a step are worth; nothing on ranks that do not answer.

        Args:
            batch: The step.
            hidden: [T, E] states of its tokens.
            head: States to logits; None where the head is on another rank.
        """
        wanted = self._choose(batch) if self._is_wanted else None
        if wanted is None:
            return ()
        tiles = [] if head is None else list(self._tiles(wanted, hidden, head))
        columns = self._tokens.measure(lambda: _joined(tiles))
        return () if columns is None else tuple(_by_row(wanted, columns))

    def _choose(self, batch: Batch) -> _Wanted | None:
        rows, positions = batch.token_rows, batch.token_positions
        is_wanted = self._num_top[rows] >= 0
        is_wanted &= positions + 1 < self._table.num_prompt[rows]
        index = is_wanted.nonzero()[0]
        if not len(index):
            return None
        places = index if batch.token_places is None else batch.token_places[index]
        return _Wanted(places=places, rows=rows[index], positions=positions[index] + 1)

    def _tiles(self, wanted: _Wanted, hidden: Tensor, head: Head) -> Iterator[LogprobColumns]:
        for start in range(0, len(wanted.places), TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            places, rows = wanted.places[tile], wanted.rows[tile]
            padded = np.pad(places, (0, -len(places) % 4), mode="edge")
            logits = head(hidden[torch.from_numpy(padded).to(hidden.device)])[: len(places)]
            targets = self._table.tokens[rows, wanted.positions[tile]].astype(np.int64)
            at = torch.from_numpy(targets).to(logits.device)
            yield measure(logits[:, : self._num_known_ids], at, self._num_top[rows])


def _joined(tiles: list[LogprobColumns]) -> LogprobColumns:
    return LogprobColumns(
        sampled_logprobs=np.concatenate([tile.sampled_logprobs for tile in tiles]),
        sampled_ranks=np.concatenate([tile.sampled_ranks for tile in tiles]),
        num_top_logprobs=np.concatenate([tile.num_top_logprobs for tile in tiles]),
        top_token_ids=np.concatenate([tile.top_token_ids for tile in tiles]),
        top_logprobs=np.concatenate([tile.top_logprobs for tile in tiles]),
    )


def _by_row(wanted: _Wanted, columns: LogprobColumns) -> Iterator[RowPromptLogprobs]:
    """The tokens of a row stand behind each other."""
    cuts = [0, *(np.flatnonzero(np.diff(wanted.rows)) + 1).tolist(), len(wanted.rows)]
    ends = np.concatenate([[0], np.cumsum(columns.num_top_logprobs)])
    for first, behind in itertools.pairwise(cuts):
        part, top = slice(first, behind), slice(int(ends[first]), int(ends[behind]))
        yield RowPromptLogprobs(
            row=int(wanted.rows[first]),
            start=int(wanted.positions[first]),
            logprobs=LogprobColumns(
                sampled_logprobs=columns.sampled_logprobs[part],
                sampled_ranks=columns.sampled_ranks[part],
                num_top_logprobs=columns.num_top_logprobs[part],
                top_token_ids=columns.top_token_ids[top],
                top_logprobs=columns.top_logprobs[top],
            ),
        )
