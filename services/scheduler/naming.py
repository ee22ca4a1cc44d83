"""When blocks get their names: what stands between a batch's plans and its prefix cache.

A plan says which blocks it fills; they are named after its result, and not at once, since a step
does not wait for names: `tidy` does it while the worker computes, `catch_up` when somebody looks.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from services.scheduler.prefix_cache import PrefixCache
from services.scheduler.results import Filled, PlanRecord
from services.scheduler.sequence import Sequence, SequenceState

# Entries of `due` that a scheduler may gather that never tidies up.
MAX_DUE: Final = 1024
# Waiting sequences that are looked up ahead of their turn.
NUM_LOOKED_UP: Final = 4


class Naming:
    """Full blocks on their way to a name.

    Args:
        cache: Where names are kept.
        block_size: Tokens of a block.
    """

    def __init__(self, cache: PrefixCache, block_size: int) -> None:
        """Nothing is planned."""
        self._cache = cache
        self._block_size = block_size
        # Of the plan under construction.
        self._filled: list[Filled] = []
        self._names: list[bytes] = []
        # Of plans whose results are here.
        self._due: list[Filled] = []

    def note_chunk(self, sequence: Sequence) -> None:
        """The plan under construction computes known tokens of a sequence."""
        num_tokens = sequence.num_planned_tokens
        if num_tokens // self._block_size > sequence.num_named_blocks:
            self._filled.append((sequence, sequence.admission, num_tokens))
            self._names += self._cache.announce(sequence, num_tokens)

    def note_growth(self, sequence: Sequence) -> None:
        """A sequence begins a further block: those before it are full once the plans are done."""
        self._filled.append((sequence, sequence.admission, sequence.num_planned_tokens))

    def take(self) -> tuple[list[Filled], list[bytes]]:
        """What was noted since the last call, for the record of the plan."""
        noted = self._filled, self._names
        self._filled, self._names = [], []
        return noted

    def settle(self, record: PlanRecord) -> None:
        """The result of a plan is here."""
        if record.names:
            self._cache.settle(record.names)
        if record.filled:
            self._due += record.filled
            if len(self._due) > MAX_DUE:
                self.catch_up()

    def catch_up(self) -> None:
        """Name what is due."""
        due, self._due = self._due, []
        for sequence, admission, num_tokens in due:
            # It may have left since, and even run again: with other blocks then.
            if sequence.state is SequenceState.RUNNING and sequence.admission == admission:
                self._cache.publish(sequence, num_tokens)

    def tidy(self, waiting: Iterable[Sequence], computing: Iterable[Sequence], count: int) -> bool:
        """Do ahead what a plan would have to do; whether there is more of it to do.

        Args:
            waiting: Those to be admitted.
            computing: Those with tokens to catch up with.
            count: Tokens that they get at most in the next plan.
        """
        self.catch_up()
        for sequence in computing:
            self._cache.hash_ahead(sequence, sequence.num_planned_tokens + count)
        found = [self._cache.look_ahead(s) for s in islice(waiting, NUM_LOOKED_UP)]
        return any(found)
