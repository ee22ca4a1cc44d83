"""What was sent to a scheduler and is not in its snapshot yet.

Snapshots are up to a tenth of a second old, and a burst would go to one scheduler until the next
one tells. A scheduler answers a submit before it sends the first snapshot that counts it, so what
was answered before a snapshot came is in it.
"""

from services.detokenizer.placement import Newcomer


class Credit:
    """Of one scheduler; an entry belongs to whatever object it is added for."""

    def __init__(self) -> None:
        """Nothing was sent."""
        self._sent: dict[object, Newcomer] = {}
        self._answered: set[object] = set()
        self.num_sequences = 0
        self.num_tokens = 0

    def add(self, owner: object, newcomer: Newcomer) -> None:
        """Something is sent."""
        self._sent[owner] = newcomer
        self.num_sequences += newcomer.num_sequences
        self.num_tokens += newcomer.num_tokens

    def answer(self, owner: object) -> None:
        """It was admitted: the next snapshot counts it."""
        if owner in self._sent:
            self._answered.add(owner)

    def remove(self, owner: object) -> None:
        """It was refused, or is over. Idempotent."""
        self._answered.discard(owner)
        newcomer = self._sent.pop(owner, None)
        if newcomer is not None:
            self.num_sequences -= newcomer.num_sequences
            self.num_tokens -= newcomer.num_tokens

    def look(self) -> None:
        """A snapshot came."""
        answered, self._answered = self._answered, set()
        for owner in answered:
            self.remove(owner)

    def clear(self) -> None:
        """The scheduler is lost, and what it was sent with it."""
        self._sent.clear()
        self._answered.clear()
        self.num_sequences = self.num_tokens = 0
