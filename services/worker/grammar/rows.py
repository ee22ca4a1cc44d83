"""The constraints of all rows, and the masks of a step: one per row and one behind each draft.

Masks are made on the host while the device computes, into one buffer that moves to it once.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.filling import MaskFiller, RowMasks
from services.worker.grammar.mask_spans import MaskSpans
from services.worker.grammar.placing import RowPlacer
from services.worker.grammar.row import RowConstraint, StuckError, Words
from services.worker.plan import Ints, NewSequence
from shared.errors import FailureReason, RequestError
from shared.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masks:
    """What the constraints of a step allow."""

    places: Ints
    """[C] among the S rows of the step, ascending."""
    words: Tensor
    """[C, W] int32 on the host: bit i of word w is id 32 w + i."""
    end_ids: tuple[frozenset[int], ...]
    """[C] where one of them is allowed the text may end."""
    is_stuck: NDArray[np.bool_]
    """[S] whether the constraint of the row has failed."""


class RowConstraints:
    """Constraints by row. One thread uses it.

    A row whose grammar fails is stuck: it has no mask, and the one who samples fails it, on all
    ranks alike.
    """

    def __init__(
        self,
        num_rows: int,
        compiler: GrammarCompiler | None = None,
        *,
        is_refusing: bool = False,
        filler: MaskFiller | None = None,
    ) -> None:
        """Without a compiler rows are masked by the rank that samples, or refused on all ranks."""
        self._compiler = compiler
        self._placer = None if compiler is None else RowPlacer(compiler)
        self._is_refusing = is_refusing
        self._rows: dict[int, RowConstraint | None] = {}
        self._coming: dict[int, Future[RowConstraint]] = {}
        self._buffer: Words = np.zeros((0, 0), np.uint32)
        self.is_constrained: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self._num_masks = self._mask_ns = 0
        self._spans = MaskSpans()
        self._filler = filler or MaskFiller()

    def admit(self, new: NewSequence) -> None:
        """Take the constraint of a new or resumed sequence, which has been prepared.

        Raises:
            RequestError: There are no grammars here.
        """
        constraint = new.sampling.constraint
        if constraint is not None and self._is_refusing:
            raise RequestError(
                FailureReason.FEATURE_DISABLED,
                "constraint: this worker has no grammars",
                field="constraint",
            )
        if constraint is None or self._placer is None:
            return
        self.is_constrained[new.row] = True
        self._spans.start(new)
        try:
            placed = self._placer.place(new)
            if isinstance(placed, Future):
                self._coming[new.row] = placed
            else:
                self._rows[new.row] = placed
        except (RequestError, StuckError) as error:
            self._give_up(new.row, error)

    def free(self, row: int) -> None:
        """Forget a row."""
        if self.is_constrained[row]:
            self.is_constrained[row] = False
            self._rows.pop(row, None)
            coming = self._coming.pop(row, None)
            if coming is not None:
                coming.cancel()
            self._spans.end(row)

    def reset(self) -> None:
        """Forget every row."""
        self.is_constrained[:] = False
        self._rows.clear()
        for coming in self._coming.values():
            coming.cancel()
        self._coming.clear()
        self._spans.clear()

    def note(self, rows: Ints, tokens: Ints) -> None:
        """Advance by the tokens that were kept."""
        if not self._is_any:
            return
        at = np.flatnonzero(self.is_constrained[rows])
        self._settle(rows[at])
        for row, token in zip(rows[at].tolist(), tokens[at].tolist(), strict=True):
            constraint = self._rows[row]
            if constraint is None:
                continue
            try:
                constraint.accept(token)
            except StuckError as error:
                self._give_up(row, error)

    def masks(self, rows: Ints, drafts_of: Callable[[int], Ints] | None) -> Masks | None:
        """The masks of a step; None where nothing is masked.

        Args:
            rows: [S] a row that has drafts stands several times, once behind each.
            drafts_of: The drafts that a place follows.
        """
        if not self._is_any:
            return None
        places = self.is_constrained[rows].nonzero()[0]
        if not len(places):
            return None
        assert self._compiler is not None
        started = time.perf_counter_ns()
        self._settle(rows[places])
        jobs = self._jobs(rows, places, drafts_of)
        self._filler.fill(list(jobs.values()))
        is_masked = np.zeros(len(places), np.bool_)
        is_stuck = np.zeros(len(rows), np.bool_)
        end_ids: list[frozenset[int]] = []
        for first, job in jobs.items():
            row = int(rows[places[first]])
            if job.error is not None:
                self._give_up(row, job.error)
            is_masked[first : first + len(job.words)] = job.is_masked
            end_ids += [job.constraint.end_ids] * sum(job.is_masked)
            self._spans.add(row, len(job.words), job.duration_ns)
        failed = [row for row, constraint in self._rows.items() if constraint is None]
        if failed:
            is_stuck = np.isin(rows, failed)
        words = self._buffer[: len(places)]
        self._num_masks += int(is_masked.sum())
        self._mask_ns += time.perf_counter_ns() - started
        if not is_masked.all():
            words = words[is_masked]
        return Masks(
            places=places[is_masked],
            words=torch.from_numpy(words.view(np.int32)),
            end_ids=tuple(end_ids),
            is_stuck=is_stuck,
        )

    def take_cost(self) -> tuple[int, int]:
        """Masks made since the last call, and microseconds that it took."""
        cost = self._num_masks, -(-self._mask_ns // 1000)
        self._num_masks = self._mask_ns = 0
        return cost

    @property
    def _is_any(self) -> bool:
        return bool(self._rows or self._coming)

    def _settle(self, rows: Ints) -> None:
        """Wait for rows that are still brought to their place."""
        if not self._coming:
            return
        for row in self._coming.keys() & set(rows.tolist()):
            try:
                self._rows[row] = self._coming.pop(row).result()
            except (RequestError, StuckError) as error:
                self._give_up(row, error)

    def _jobs(
        self, rows: Ints, places: Ints, drafts_of: Callable[[int], Ints] | None
    ) -> dict[int, RowMasks]:
        """What is to be made of each row, by its first place among the constrained ones."""
        assert self._compiler is not None
        words = self._room(len(places), self._compiler.vocabulary.num_words)
        address, stride = self._buffer.ctypes.data, words.strides[0]
        jobs: dict[int, RowMasks] = {}
        for first, count in _runs(rows[places]):
            constraint = self._rows[int(rows[places[first]])]
            if constraint is None:
                continue
            last = int(places[first + count - 1])
            jobs[first] = RowMasks(
                constraint,
                words[first : first + count],
                address + first * stride,
                [] if drafts_of is None or count == 1 else drafts_of(last).tolist(),
            )
        return jobs

    def _room(self, count: int, num_words: int) -> Words:
        if self._buffer.shape[0] < count:
            self._buffer = np.zeros((2 * count, num_words), np.uint32)
        return self._buffer[:count]

    def _give_up(self, row: int, error: Exception) -> None:
        # The text may quote the client's schema: it stays in this log.
        _log.warning("a constraint failed: %s", error, extra={"row": row})
        self._rows[row] = None


def _runs(rows: Ints) -> list[tuple[int, int]]:
    """First place and length of each run of equal rows."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    counts = np.diff(starts, append=len(rows))
    return list(zip(starts.tolist(), counts.tolist(), strict=True))


def stuck() -> RequestError:
    """The failure of a row whose constraint cannot go on."""
    return RequestError(
        FailureReason.INVALID_ARGUMENT,
        "constraint: it is too complex at this place of the output, or leaves no token beside "
        "allowed_token_ids and bad_words",
        field="constraint",
    )
