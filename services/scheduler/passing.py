"""Who may pass waiting sequences that do not fit.

A large sequence at the head must not stop small ones behind it while there is room for them, and
they must not take that room from it for ever: those that pass it may take as many blocks as it
needs itself, all together; then nobody passes until it has started.
"""

from services.scheduler.sequence import Sequence


class Passing:
    """The sequences that could not start in one walk along the queue."""

    __slots__ = ("_stopped",)

    def __init__(self) -> None:
        """Everybody could."""
        self._stopped: list[tuple[Sequence, int]] = []

    def stop(self, sequence: Sequence, num_needed: int) -> None:
        """A sequence has no room for the blocks that it needs."""
        self._stopped.append((sequence, num_needed))

    def allows(self, num_needed: int) -> bool:
        """Whether one that needs so many blocks may pass all of them."""
        return all(s.num_passed_blocks + num_needed <= own for s, own in self._stopped)

    def note(self, num_needed: int) -> None:
        """One that takes so many blocks has passed them."""
        for sequence, _ in self._stopped:
            sequence.num_passed_blocks += num_needed
