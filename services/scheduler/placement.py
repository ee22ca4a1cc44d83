"""Which replica gets a waiting sequence: one pure function over the replicas' loads.

A sequence goes where it will be computed first: to the replica with the least work, counted in
steps that its tokens and those of the sequence fill, plus the share of its cache that is taken.
Tokens that a replica holds already are no work. Only replicas with room for it now are asked, so
that a sequence is not bound to one replica while another becomes free.

Law: what a replica holds attracts nobody to it while it has more than its share of sequences. A
start that everybody has in common is computed at several replicas rather than queued for at one.
"""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Final

# A replica's share of the sequences: so many times the mean, and beside that a sixteenth of the
# seats, since that many rows make a decode step hardly longer, and one.
MAX_SKEW: Final = 1.25
FREE_SEATS: Final = 1 / 16


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
        max_sequence_len: Most tokens of a sequence that is alone there.
        num_named_blocks: Blocks that can be found in its prefix cache.
    """

    num_sequences: int
    num_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_sequence_len: int
    num_named_blocks: int = 0

    def cost(self, num_missing: int = 0) -> float:
        """Steps that its tokens and those of a newcomer fill, plus the share of taken blocks.

        What the newcomer lacks counts twice: it waits for that, and so does who comes behind it.
        """
        num_taken = self.num_total_blocks - self.num_free_blocks
        steps = (self.num_tokens + 2 * num_missing) / self.max_num_batched_tokens
        return steps + num_taken / self.num_total_blocks

    def has_room(self, num_blocks: int) -> bool:
        """Whether a further sequence of so many blocks can start."""
        return self.num_sequences < self.max_num_seqs and num_blocks <= self.num_free_blocks


def choose_replica(
    replicas: ListOf[ReplicaWork | None],
    num_blocks: int,
    num_tokens: int = 0,
    num_hit_tokens: ListOf[int] = (),
) -> int | None:
    """The replica for a sequence; None when it has to wait for room.

    Of those that cost the same the one that caches least is taken: what it computes there pushes
    out least.

    Args:
        replicas: Work of each; None for one that is lost, or is to get nothing.
        num_blocks: What the sequence needs to start.
        num_tokens: Known tokens of the sequence.
        num_hit_tokens: Those of them that each replica holds; none if not given.
    """
    mean = mean_after(replicas)
    best: tuple[float, int, int] | None = None
    for number, work in enumerate(replicas):
        if work is not None and work.has_room(num_blocks):
            is_attractive = num_hit_tokens and work.num_sequences + 1 <= fair_most(work, mean)
            num_hits = num_hit_tokens[number] if is_attractive else 0
            candidate = (work.cost(num_tokens - num_hits), work.num_named_blocks, number)
            best = candidate if best is None else min(best, candidate)
    return None if best is None else best[-1]


def mean_after(replicas: ListOf[ReplicaWork | None]) -> float:
    """Sequences per replica once a further one is placed."""
    counts = [work.num_sequences for work in replicas if work is not None]
    return (sum(counts) + 1) / len(counts) if counts else 0.0


def fair_most(work: ReplicaWork, mean: float) -> float:
    """Most sequences to which what a replica holds may bring it."""
    return MAX_SKEW * mean + FREE_SEATS * work.max_num_seqs + 1
