"""Which replica gets a waiting sequence: one pure function over the replicas' loads.

A sequence goes where it will be computed first: to the replica with the least work, counted in
steps that its tokens fill plus the share of its cache that is taken. Only replicas with room for it
now are asked, so that a sequence is not bound to one replica while another becomes free.
"""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWork:
    """What a replica has to do. Sequences that were placed but do not run yet count as if they did.

    Attributes:
        num_sequences: Of the replica.
        num_tokens: Tokens that its sequences have to catch up with; one each at least.
        num_free_blocks: Blocks that nobody has or waits for; negative when too many are waited for.
        num_total_blocks: Blocks of its cache.
        max_num_seqs: Most sequences of a step.
        max_num_batched_tokens: Most tokens of a step.
    """

    num_sequences: int
    num_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def cost(self) -> float:
        """Steps until its tokens are computed, plus the share of its blocks that is taken."""
        num_taken = self.num_total_blocks - self.num_free_blocks
        return self.num_tokens / self.max_num_batched_tokens + num_taken / self.num_total_blocks

    def has_room(self, num_blocks: int) -> bool:
        """Whether a further sequence of so many blocks can start."""
        return self.num_sequences < self.max_num_seqs and num_blocks <= self.num_free_blocks


def choose_replica(replicas: ListOf[ReplicaWork | None], num_blocks: int) -> int | None:
    """The replica for a sequence; None when it has to wait for room.

    Args:
        replicas: Work of each; None for one that is lost.
        num_blocks: What the sequence needs to start.
    """
    best: tuple[float, int] | None = None
    for number, work in enumerate(replicas):
        if work is not None and work.has_room(num_blocks):
            candidate = (work.cost, number)
            best = candidate if best is None else min(best, candidate)
    return None if best is None else best[1]
