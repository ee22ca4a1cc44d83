"""The constraints of all rows, and the masks of a step: one per row and one behind each draft.

Masks are made on the host while the device computes, into one buffer that moves to it once. Behind
a draft that its grammar forbids nothing is masked: what is sampled there is never kept.
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
from services.worker.grammar.mask_spans import MaskSpans
from services.worker.grammar.placing import RowPlacer
from services.worker.grammar.row import RowConstraint, StuckError, Words, allows
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
        places = np.flatnonzero(self.is_constrained[rows]) if self._is_any else ()
        if not len(places):
            return None
        assert self._compiler is not None
        started = time.perf_counter_ns()
        self._settle(rows[places])
        words = self._room(len(places), self._compiler.vocabulary.num_words)
        address, stride = self._buffer.ctypes.data, words.strides[0]
        is_masked = np.zeros(len(places), np.bool_)
        is_stuck = np.zeros(len(rows), np.bool_)
        end_ids: list[frozenset[int]] = []
        for first, count in _runs(rows[places]):
            row, last = int(rows[places[first]]), int(places[first + count - 1])
            drafts = [] if drafts_of is None or count == 1 else drafts_of(last).tolist()
            part = slice(first, first + count)
            began = time.perf_counter_ns()
            is_masked[part] = self._fill(row, words[part], address + first * stride, drafts)
            constraint = self._rows[row]
            is_stuck[places[part]] = constraint is None
            if constraint is not None:
                end_ids += [constraint.end_ids] * int(is_masked[part].sum())
            self._spans.add(row, count, time.perf_counter_ns() - began)
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

    def _fill(self, row: int, words: Words, address: int, drafts: list[int]) -> list[bool]:
        """Masks at a row and behind each of its drafts; whether there is one."""
        is_masked = [False] * len(words)
        constraint = self._rows[row]
        if constraint is None:
            return is_masked
        try:
            mark = constraint.mark()
            for place, each in enumerate(words):
                is_masked[place] = constraint.fill(each, address + place * words.strides[0])
                if place == len(drafts):
                    break
                if is_masked[place] and not allows(each, drafts[place]):
                    break
                constraint.accept(drafts[place])
            constraint.back_to(mark)
        except StuckError as error:
            self._give_up(row, error)
            return [False] * len(words)
        return is_masked

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
