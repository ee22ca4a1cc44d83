"""One replica as the core sees it: its epoch if one stands, and the sequences placed on it.

With several replicas a sequence waits in the core's queue until one has room for it, then in that
replica's own. A single replica has nothing to choose: its queue is the core's.
"""

import dataclasses

from services.scheduler.batch import Batch
from services.scheduler.draft_counts import add_positions
from services.scheduler.limits import Limits
from services.scheduler.pace import StepClock
from services.scheduler.placement import ReplicaWork
from services.scheduler.plan import WorkerContractError
from services.scheduler.sequence import Sequence
from services.scheduler.waiting import WaitingQueue
from shared.sampling import LoadSnapshot, ReplicaLoad

# What replicas must have in common, so that a sequence can go on at another. Their caches may have
# different sizes: a sequence goes only where all of it has room (`placer.py`).
_COMMON = (
    "max_model_len",
    "block_size",
    "vocab_size",
    "is_replay",
    "num_speculative_tokens",
)


class Replica:
    """State of one worker group."""

    __slots__ = ("batch", "clock", "is_draining", "limits", "past", "waiting")

    def __init__(self, waiting: WaitingQueue) -> None:
        """No epoch yet."""
        self.waiting = waiting
        self.batch: Batch | None = None
        self.clock = StepClock()
        # It gets nothing new while another one stands; so in all its epochs.
        self.is_draining = False
        # Of the epoch that stands, or stood last.
        self.limits: Limits | None = None
        # Counters of the epochs that are over.
        self.past = LoadSnapshot()

    def close(self) -> list[Sequence]:
        """Its epoch is over; the sequences that ran, in the order of their admission."""
        batch, self.batch = self.batch, None
        if batch is None:
            return []
        self.past = add_counters(self.past, _counters(batch))
        batch.cache.close()
        return list(batch.running)

    def work(self) -> ReplicaWork | None:
        """What it has to do; None without an epoch."""
        batch = self.batch
        if batch is None:
            return None
        limits, waiting = batch.limits, self.waiting
        return ReplicaWork(
            num_sequences=len(batch.running) + len(waiting),
            num_tokens=(
                len(batch.running)
                + batch.num_catch_up_tokens
                + waiting.num_tokens
                - waiting.num_hit_tokens
            ),
            num_free_blocks=batch.holdings.num_free_blocks - waiting.num_blocks,
            num_total_blocks=batch.holdings.num_total_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_sequence_len=limits.max_sequence_len,
            num_named_blocks=batch.cache.num_named,
        )

    def load(self) -> ReplicaLoad:
        """A snapshot of this replica alone."""
        counters = self.counters()
        return ReplicaLoad(
            is_ready=counters.is_worker_ready,
            num_running=counters.num_running,
            num_waiting=len(self.waiting),
            num_free_blocks=counters.num_free_blocks,
            num_total_blocks=counters.num_total_blocks,
            num_steps_total=counters.num_steps_total,
            num_cached_blocks=counters.num_cached_blocks,
            num_prefix_cache_queries_total=counters.num_prefix_cache_queries_total,
            num_prefix_cache_hits_total=counters.num_prefix_cache_hits_total,
            is_draining=self.is_draining,
        )

    def counters(self) -> LoadSnapshot:
        """Counters of all its epochs, and what it holds now."""
        batch = self.batch
        past = dataclasses.replace(
            self.past,
            step_us_total=round(self.clock.busy_s * 1e6),
            step_idle_us_total=round(self.clock.idle_s * 1e6),
        )
        if batch is None:
            return past
        takes_requests = not self.is_draining
        return dataclasses.replace(
            add_counters(past, _counters(batch)),
            max_num_seqs=takes_requests * batch.limits.max_num_seqs,
            max_num_batched_tokens=takes_requests * batch.limits.max_num_batched_tokens,
            num_catch_up_tokens=batch.num_catch_up_tokens,
            num_running=len(batch.running),
            num_free_blocks=batch.holdings.num_free_blocks,
            num_total_blocks=batch.holdings.num_total_blocks,
            num_cached_blocks=batch.cache.num_named,
            is_worker_ready=True,
        )


def blocks_to_start(sequence: Sequence, limits: Limits) -> int:
    """Blocks that a waiting sequence takes at its admission."""
    most = sequence.num_tokens + limits.num_proposal_tokens
    return limits.blocks_for(min(most, sequence.total_limit - 1))


def check_alike(limits: Limits, others: list[Replica]) -> None:
    """Refuse a replica on which the sequences of the others could not go on.

    Raises:
        WorkerContractError: It names what differs.
    """
    for number, other in enumerate(others):
        if other.batch is None:
            continue
        for name in _COMMON:
            own, known = getattr(limits, name), getattr(other.batch.limits, name)
            if own != known:
                raise WorkerContractError(f"{name} is {own}, replica {number} has {known}")


def add_counters(a: LoadSnapshot, b: LoadSnapshot) -> LoadSnapshot:
    """The sum of what two snapshots count."""
    return LoadSnapshot(
        num_running=a.num_running + b.num_running,
        max_num_seqs=a.max_num_seqs + b.max_num_seqs,
        max_num_batched_tokens=a.max_num_batched_tokens + b.max_num_batched_tokens,
        num_catch_up_tokens=a.num_catch_up_tokens + b.num_catch_up_tokens,
        num_free_blocks=a.num_free_blocks + b.num_free_blocks,
        num_total_blocks=a.num_total_blocks + b.num_total_blocks,
        num_steps_total=a.num_steps_total + b.num_steps_total,
        num_prompt_tokens_total=a.num_prompt_tokens_total + b.num_prompt_tokens_total,
        num_output_tokens_total=a.num_output_tokens_total + b.num_output_tokens_total,
        num_preemptions_total=a.num_preemptions_total + b.num_preemptions_total,
        num_recomputed_tokens_total=a.num_recomputed_tokens_total + b.num_recomputed_tokens_total,
        step_us_total=a.step_us_total + b.step_us_total,
        step_idle_us_total=a.step_idle_us_total + b.step_idle_us_total,
        is_worker_ready=a.is_worker_ready or b.is_worker_ready,
        num_cached_blocks=a.num_cached_blocks + b.num_cached_blocks,
        num_prefix_cache_queries_total=(
            a.num_prefix_cache_queries_total + b.num_prefix_cache_queries_total
        ),
        num_prefix_cache_hits_total=a.num_prefix_cache_hits_total + b.num_prefix_cache_hits_total,
        num_drafts_total=a.num_drafts_total + b.num_drafts_total,
        num_drafted_tokens_total=a.num_drafted_tokens_total + b.num_drafted_tokens_total,
        num_accepted_tokens_per_position=add_positions(
            a.num_accepted_tokens_per_position, b.num_accepted_tokens_per_position
        ),
    )


def _counters(batch: Batch) -> LoadSnapshot:
    return LoadSnapshot(
        num_steps_total=batch.last_planned_step - batch.num_in_flight,
        num_prompt_tokens_total=batch.num_prompt_tokens,
        num_output_tokens_total=batch.num_output_tokens,
        num_preemptions_total=batch.num_preemptions,
        num_prefix_cache_queries_total=batch.cache.counts.num_queries,
        num_prefix_cache_hits_total=batch.cache.counts.num_hits,
        num_recomputed_tokens_total=batch.num_recomputed_tokens,
        num_drafts_total=batch.drafts.num_drafts,
        num_drafted_tokens_total=batch.drafts.num_drafted_tokens,
        num_accepted_tokens_per_position=tuple(batch.drafts.per_position),
    )
