"""Who is next, and who gives way: one value that queues and batches share.

Waiting sequences stand in lanes: those that ran before in one, new ones in one per tenant. Inside a
lane the order is fixed by a key; between lanes by level, then by what the tenants were served.

- fcfs: one level; those that ran before come first, then the tenant that was served least.
- priority: the level is the priority (smaller is earlier), and every `ageing_s` of waiting takes
  one off it. Inside a lane the same is said by a key that never changes: a sequence of priority p
  counts as if it had come `p * ageing_s` later. Between lanes the waiting counts from the lane's
  last turn, so a tenant's long backlog is no claim, and nobody waits for ever.
"""

from collections.abc import Iterable
from typing import Final

from services.scheduler.limits import CoreConfig
from services.scheduler.sequence import Sequence
from shared.shares import Shares

# Of a token, in what a tenant was served: an output token costs a step of its own. As prices of
# prompt and output tokens are; S. Sheng et al., Fairness in Serving LLMs, 2024.
PROMPT_WEIGHT: Final = 1
OUTPUT_WEIGHT: Final = 2
# The lane of sequences that ran before.
RESUMED: Final = None
LaneName = str | None
Key = tuple[float, float]

# A sequence is displaced by more urgent ones so often, then it runs to its end.
MAX_DISPLACEMENTS: Final = 3


class Policy:
    """The order of service of one scheduler."""

    def __init__(self, config: CoreConfig) -> None:
        """Nobody was served."""
        self.is_priority = config.policy == "priority"
        self._ageing_s = config.priority_ageing_s
        self._is_fair = config.enable_fair_share
        self.shares = Shares()
        self._num_numbered = 0

    def number(self, sequence: Sequence) -> None:
        """Give a sequence its place among those with equal keys; it keeps it."""
        if sequence.number < 0:
            sequence.number = self._num_numbered
            self._num_numbered += 1

    def lane_of(self, sequence: Sequence) -> LaneName:
        """Where a waiting sequence stands."""
        if sequence.admission or sequence.is_resumed:
            return RESUMED
        return sequence.tenant_id if self._is_fair else ""

    def key(self, sequence: Sequence) -> Key:
        """Its place inside the lane, smaller is earlier; never changes."""
        arrived_at = sequence.arrived_at
        if not self.is_priority:
            return (0.0, arrived_at)
        if not self._ageing_s:
            return (sequence.priority, arrived_at)
        return (arrived_at + sequence.priority * self._ageing_s, arrived_at)

    def level(self, sequence: Sequence, served_at: float, now: float) -> int:
        """Its class against those of other lanes; `served_at` is its lane's last turn."""
        if not self.is_priority:
            return 0
        if not self._ageing_s:
            return sequence.priority
        waited_s = now - max(sequence.waits_since, served_at)
        return sequence.priority - int(waited_s / self._ageing_s)

    def served(self, lane: LaneName) -> float:
        """What the lane was served; one that ran before has been paid for."""
        return -1.0 if lane is None else self.shares.served(lane)

    # -- those that run ------------------------------------------------------------------------

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Prompt tokens of a sequence that starts for the first time."""
        self.shares.charge(sequence.tenant_id, PROMPT_WEIGHT * num_tokens)

    def charge_output(self, sequence: Sequence) -> None:
        """Output tokens since the last call; told once in a while, not at every token."""
        count = len(sequence.output_token_ids)
        num_new = count - sequence.num_charged_tokens
        self.shares.charge(sequence.tenant_id, OUTPUT_WEIGHT * num_new)
        sequence.num_charged_tokens = count

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who gives its blocks back when there are none: the least urgent, then the cheapest.

        The most urgent one that was admitted first is spared while others run, so somebody always
        gets to an end.
        """
        found = list(running)
        if len(found) > 1:
            found.remove(min(found, key=self._urgency))
        return min(found, key=self._cost)

    def displaceable(self, running: Iterable[Sequence], waiting: Sequence) -> list[Sequence]:
        """Those that a waiting sequence may push out, the first to go first.

        Only priorities as they were given count, not the time waited: else two could take turns.
        """
        if not self.is_priority:
            return []
        found = [
            s
            for s in running
            if s.priority > waiting.priority and s.num_displacements < MAX_DISPLACEMENTS
        ]
        return sorted(found, key=self._cost)

    def _urgency(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self.is_priority else 0, sequence.admission)

    def _cost(self, sequence: Sequence) -> tuple[int, int, int]:
        """What it costs to compute it again; of equals the latest admitted goes first."""
        priority = sequence.priority if self.is_priority else 0
        return (-priority, sequence.num_planned_tokens, -sequence.admission)
