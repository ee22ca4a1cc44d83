"""How good drafts are: how many steps verified some, how many there were, how many were kept."""

from collections import Counter
from itertools import accumulate, zip_longest

from shared.log import get_logger
from shared.sampling import LoadSnapshot

# Enough steps to judge by; the first draft of a layer that fits its model is right far more often.
MIN_DRAFTS, MIN_SHARE = 1000, 0.05

_log = get_logger(__name__)


class DraftCounts:
    """Counters of one epoch."""

    __slots__ = ("num_drafted_tokens", "num_drafts", "per_position")

    def __init__(self, num_speculative_tokens: int) -> None:
        """All zero."""
        self.num_drafts = 0
        self.num_drafted_tokens = 0
        self.per_position = (0,) * num_speculative_tokens

    def add(self, drafted: list[int], accepted: list[int]) -> None:
        """Count the rows of one result: drafts verified and drafts kept of each."""
        self.num_drafts += len(drafted) - drafted.count(0)
        self.num_drafted_tokens += sum(drafted)
        rows_with = Counter(accepted)
        # Whoever keeps a draft keeps those before it: counted from the last place to the first.
        places = range(len(self.per_position), 0, -1)
        reached = tuple(accumulate(rows_with[place] for place in places))
        self.per_position = add_positions(self.per_position, reached[::-1])


def add_positions(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The sums of two counts by position; a missing one is 0."""
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))


class DraftWatch:
    """Tells once when drafts cost time and bring nothing."""

    def __init__(self) -> None:
        """Nothing was told."""
        self._is_told = False

    def look(self, load: LoadSnapshot) -> None:
        """Compare the first drafts that were kept with all steps that had some."""
        if self._is_told or load.num_drafts_total < MIN_DRAFTS:
            return
        kept = next(iter(load.num_accepted_tokens_per_position), 0)
        if kept < MIN_SHARE * load.num_drafts_total:
            self._is_told = True
            _log.warning(
                "drafts are hardly ever right: is the MTP layer that of this model?",
                extra={"num_drafts": load.num_drafts_total, "num_first_kept": kept},
            )
