"""Where one sequence stands in its grammar, and which ids may follow.

    WAITING --start id--> INSIDE --end of the text--> DONE
    FREE --<tool_call>--> INSIDE --</tool_call>--> FREE, or DONE after a single call

- WAITING: the model thinks. Everything may follow except what would end the output without text.
- FREE: ordinary text of a triggered constraint; nothing is masked.
- INSIDE: what the grammar allows, and the ends of the sequence once it is satisfied.
- DONE: the ends of the sequence alone.

JSON has a bounded number of blanks in a row, also inside its strings: a model that is lost in them
would write nothing else up to the limit of its output.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.worker.grammar.compiler import CompiledGrammar, reason_of
from services.worker.grammar.formats import is_json

Words = NDArray[np.uint32]
_ALL = np.uint32(0xFFFFFFFF)
# Bytes. Wider than the padding of tables and the indentation of code in strings.
_MAX_BLANKS: Final = 128


class Phase(enum.Enum):
    """Which rule holds."""

    WAITING = enum.auto()
    FREE = enum.auto()
    INSIDE = enum.auto()
    DONE = enum.auto()


class StuckError(Exception):
    """The grammar cannot go on: no id is left, or its bounds are reached."""


@dataclass(slots=True, eq=False)
class _Run:
    """A matcher and what it has taken."""

    matcher: LLMatcher
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A place to come back to."""

    phase: Phase
    run: _Run | None
    num_tokens: int
    num_blanks: int


class RowConstraint:
    """The constraint of one row. One thread uses it."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        end_ids: Iterable[int],
        outputs: Iterable[int],
        *,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """A new or resumed sequence.

        Args:
            grammar: Of its constraint.
            end_ids: Ids that end it once the grammar is satisfied, and stand nowhere else.
            outputs: What it has so far.
            stop_ids: Further ids that end it, there or where the grammar itself has them.

        Raises:
            StuckError: The outputs do not follow the grammar.
        """
        control = grammar.vocabulary.control
        self._grammar = grammar
        self._trigger = control.tool_call
        self._eos = control.end_of_text
        eos = frozenset(end_ids) or frozenset({self._eos})
        self.end_ids = eos | frozenset(stop_ids)
        """Where one of them is in a mask the text may end."""
        self._ends = _bits(self.end_ids)
        self._ends_and_eos = _bits(eos | {self._eos})
        self._not_while_waiting = _bits(eos | {self._trigger})
        self._blanks = grammar.vocabulary.blanks if is_json(grammar.constraint.format) else {}
        self._num_blanks = 0
        self._run: _Run | None = None
        if grammar.is_triggered:
            self._phase = Phase.FREE
        elif grammar.constraint.start_after_token_id is not None:
            self._phase = Phase.WAITING
        else:
            self._enter()
        for token in outputs:
            self.accept(token)

    @property
    def phase(self) -> Phase:
        """Which rule holds now."""
        return self._phase

    def fill(self, words: Words, address: int) -> bool:
        """Write the mask of the next token, a bit per id; False where nothing is masked.

        Args:
            words: The mask.
            address: Where it lies in memory; numpy takes its time to tell.

        Raises:
            StuckError: No id is left, or a bound of the engine was reached.
        """
        if self._phase is Phase.FREE:
            return False
        if self._phase is Phase.WAITING:
            words[:] = _ALL
            _clear(words, self._not_while_waiting)
        elif self._phase is Phase.DONE:
            words[:] = 0
            _set(words, self._ends)
        else:
            self._fill_inside(words, address)
        return True

    def accept(self, token: int) -> None:
        """The token follows.

        Raises:
            StuckError: The grammar does not allow it.
        """
        if self._phase is Phase.WAITING:
            if token == self._grammar.constraint.start_after_token_id:
                self._enter()
        elif self._phase is Phase.FREE:
            if token == self._trigger:
                self._enter()
        elif self._phase is Phase.INSIDE:
            self._accept_inside(token)

    def mark(self) -> Mark:
        """Where it stands."""
        num_tokens = self._run.num_tokens if self._run else 0
        return Mark(self._phase, self._run, num_tokens, self._num_blanks)

    def back_to(self, mark: Mark) -> None:
        """Forget what was accepted since."""
        self._phase, self._run, self._num_blanks = mark.phase, mark.run, mark.num_blanks
        if self._run is not None and self._run.num_tokens > mark.num_tokens:
            count = self._run.num_tokens - mark.num_tokens
            if not self._run.matcher.rollback(count):
                raise StuckError(reason_of(self._run.matcher))
            self._run.num_tokens = mark.num_tokens

    def _enter(self) -> None:
        self._phase = Phase.INSIDE
        # A matcher of its own for each call: a mark may still need the one before.
        self._run = _Run(self._grammar.matcher())

    def _fill_inside(self, words: Words, address: int) -> None:
        assert self._run is not None
        matcher = self._run.matcher
        matcher.unsafe_compute_mask_ptr(address, words.nbytes)
        if matcher.is_error():
            raise StuckError(reason_of(matcher))
        is_satisfied = allows(words, self._eos)
        has_ends = _has(words, self._ends_and_eos)
        if has_ends:
            _clear(words, self._ends_and_eos)
        if self._num_blanks >= _MAX_BLANKS:
            self._refuse_blanks(words)
        if is_satisfied:
            _set(words, self._ends)
        elif has_ends and not words.any():  # what the engine gives is never empty
            raise StuckError("the grammar leaves no token")

    def _refuse_blanks(self, words: Words) -> None:
        """Leave blanks out, unless they are all there is."""
        others = words.copy()
        _clear(others, _bits(self._blanks))
        if others.any():
            words[:] = others

    def _accept_inside(self, token: int) -> None:
        assert self._run is not None
        if token in self.end_ids:
            self._phase = Phase.DONE
            return
        matcher = self._run.matcher
        if not matcher.consume_token(token):
            raise StuckError(reason_of(matcher))
        self._run.num_tokens += 1
        if self._blanks:
            num_bytes = self._blanks.get(token, 0)
            self._num_blanks = self._num_blanks + num_bytes if num_bytes else 0
        if matcher.is_stopped():
            calls = self._grammar.constraint.calls
            is_again = self._grammar.is_triggered and calls is not None and calls.is_parallel
            self._phase = Phase.FREE if is_again else Phase.DONE


def allows(words: Words, token: int) -> bool:
    """Whether a mask has a token."""
    return bool(int(words[token // 32]) >> (token % 32) & 1)


# Words of a mask with the bits that matter there: a few plain numbers beat any array.
_Bits = tuple[tuple[int, int], ...]


def _bits(ids: Iterable[int]) -> _Bits:
    found: dict[int, int] = {}
    for each in ids:
        found[each // 32] = found.get(each // 32, 0) | 1 << each % 32
    return tuple(found.items())


def _has(words: Words, bits: _Bits) -> bool:
    return any(int(words[place]) & mask for place, mask in bits)


def _set(words: Words, bits: _Bits) -> None:
    for place, mask in bits:
        words[place] = int(words[place]) | mask


def _clear(words: Words, bits: _Bits) -> None:
    for place, mask in bits:
        words[place] = int(words[place]) & ~mask
