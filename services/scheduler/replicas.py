"""All replicas of a scheduler, and the queue of those who wait for any of them.

What they hold, do and count together is answered here; what becomes of a sequence is decided in
`core.py`.

Law: `limits` are those of the replica that holds the longest sequence of all that stand. Who waits
for any replica fits one that stands, or none stands.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from services.scheduler.backlog import Backlog
from services.scheduler.batch import Batch
from services.scheduler.cache_events import CachedBlock, CacheLog
from services.scheduler.holders import Holders
from services.scheduler.limits import Limits
from services.scheduler.placer import Placer
from services.scheduler.policy import Policy
from services.scheduler.prefix_cache import PrefixCache
from services.scheduler.replica import Replica, add_counters, check_alike
from services.scheduler.results import BatchOwner
from services.scheduler.sequence import NOWHERE, Sequence, SequenceState
from services.scheduler.waiting import WaitingQueue
from shared.sampling import LoadSnapshot


class Replicas:
    """The worker groups of one model.

    Args:
        count: How many; each is called by its number.
        policy: The order of their queues.
    """

    def __init__(self, count: int, policy: Policy) -> None:
        """None stands, nobody waits."""
        # Those that belong to no replica yet; of a single one, all that wait.
        self.waiting = WaitingQueue(policy)
        is_single = count == 1
        self._all = [
            Replica(self.waiting if is_single else WaitingQueue(policy)) for _ in range(count)
        ]
        # The replica of those that wait for any: a single one has nothing to choose.
        self.unplaced = 0 if is_single else NOWHERE
        holders = None if is_single else Holders()
        self.cache_log = CacheLog(self._named_blocks, holders=holders)
        self.placer = Placer(self.waiting, self._all, holders)
        # None before the first replica was reached; of the last ones while none stands.
        self.limits: Limits | None = None

    def __getitem__(self, number: int) -> Replica:
        return self._all[number]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    # -- coming and going ----------------------------------------------------------------------

    def open(self, number: int, limits: Limits, owner: BatchOwner) -> None:
        """A replica stands, with empty caches.

        Raises:
            WorkerContractError: It is not like those whose sequences it may get.
        """
        opened = self._all[number]
        assert opened.batch is None, "an epoch is open already"
        check_alike(limits, self._all)
        opened.limits = limits
        cache = PrefixCache(limits, self.cache_log, number)
        opened.batch = Batch(limits, opened.waiting, owner, cache, opened.clock)
        self._look_anew()

    def close(self, number: int) -> tuple[list[Sequence], list[Sequence]]:
        """A replica is lost; the sequences that ran there, and those that only waited there."""
        lost = self._all[number]
        ran, waited = lost.close(), []
        if lost.waiting is not self.waiting:
            waited = list(lost.waiting)
            for sequence in waited:
                lost.waiting.remove(sequence)
        self._look_anew()
        return ran, waited

    def _look_anew(self) -> None:
        standing = [r.limits for r in self._all if r.batch and r.limits]
        if standing:
            self.limits = max(standing, key=lambda limits: limits.max_sequence_len)
        self.placer.look_anew()

    @property
    def is_standing(self) -> bool:
        """Whether there is a replica that takes plans."""
        return any(replica.batch for replica in self._all)

    # -- together ------------------------------------------------------------------------------

    def queue_of(self, sequence: Sequence) -> WaitingQueue:
        """Where a sequence waits."""
        if sequence.replica == self.unplaced:
            return self.waiting
        return self._all[sequence.replica].waiting

    def is_prompt_step(self, numbers: Iterable[int], interval: int) -> bool:
        """Whether the next step of replicas that step together takes prompts.

        All take them in the same steps, every `interval`th: a prompt makes a step a long one for
        all replicas. Nobody waits where none decodes, or all have prompts.
        """
        batches = [b for number in numbers if (b := self._all[number].batch) is not None]
        step = max(batch.last_planned_step for batch in batches) + 1
        return (
            step % interval == 0
            or not any(batch.decodes for batch in batches)
            or all(batch.has_prompts for batch in batches)
        )

    def tidy(self) -> bool:
        """Do what no step has to wait for; whether there is more of it to do."""
        return any([replica.batch.tidy() for replica in self._all if replica.batch])

    def clear_caches(self) -> int:
        """Let nobody share what was computed so far; returns how many blocks that concerns."""
        return sum(replica.batch.clear_cache() for replica in self._all if replica.batch)

    # -- what they count -----------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold rows."""
        return sum(len(replica.batch.running) for replica in self._all if replica.batch)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing."""
        return len(self.waiting) + sum(map(len, self._placed_queues()))

    @property
    def num_started(self) -> int:
        """Admissions of all epochs."""
        return sum(replica.clock.num_started for replica in self._all)

    def load(self) -> LoadSnapshot:
        """Their counters, and what waits."""
        totals = self._all[0].counters()
        for replica in self._all[1:]:
            totals = add_counters(totals, replica.counters())
        return dataclasses.replace(
            totals,
            num_waiting=self.num_waiting,
            num_waiting_tokens=self._num_waiting_tokens,
            max_model_len=self.limits.max_sequence_len if self.limits else 0,
            replicas=tuple(replica.load() for replica in self._all),
        )

    def backlog(self, sequences_per_s: float | None) -> Backlog:
        """What there is to do, and how fast it was done of late."""
        open_ones = [(r, r.batch) for r in self._all if r.batch]
        return Backlog(
            num_sequences=self.num_waiting,
            num_tokens=self._num_waiting_tokens,
            num_catch_up_tokens=sum(batch.num_catch_up_tokens for _, batch in open_ones),
            sequences_per_s=sequences_per_s,
            prompt_tokens_per_s=sum(r.clock.prompt_tokens_per_s for r, _ in open_ones),
        )

    @property
    def _num_waiting_tokens(self) -> int:
        return self.waiting.num_tokens + sum(q.num_tokens for q in self._placed_queues())

    def _placed_queues(self) -> list[WaitingQueue]:
        """Queues of replicas beside the common one."""
        return [r.waiting for r in self._all if r.waiting is not self.waiting]

    def _named_blocks(self) -> list[CachedBlock]:
        batches = [replica.batch for replica in self._all if replica.batch]
        return [block for batch in batches for block in batch.cache.named_blocks()]

    # -- for tests -----------------------------------------------------------------------------

    def check(self) -> list[Sequence]:
        """Assert what holds of all of them; returns every sequence that they have."""
        running: list[Sequence] = []
        waiting = list(self.waiting)
        assert all(sequence.replica == self.unplaced for sequence in waiting)
        for number, replica in enumerate(self._all):
            own = list(replica.waiting)
            is_shared = replica.waiting is self.waiting
            assert replica.batch or is_shared or not own, "a sequence waits at a lost replica"
            if replica.batch:
                replica.batch.check()
                own += replica.batch.running
                running += replica.batch.running
                most = replica.batch.limits.max_sequence_len
                assert all(s.total_limit <= most for s in own), "a sequence that can never end"
            assert all(sequence.replica == number for sequence in own), "a sequence is elsewhere"
        if self.is_standing:
            most = max(r.limits.max_sequence_len for r in self._all if r.batch and r.limits)
            assert all(s.total_limit <= most for s in waiting), "a sequence waits for nobody"
        waiting += [sequence for queue in self._placed_queues() for sequence in queue]
        assert not set(running) & set(waiting), "a sequence runs and waits"
        for sequence in waiting:
            assert sequence.state is SequenceState.WAITING
            assert not sequence.blocks, "a waiting sequence holds blocks"
            assert sequence.row < 0, "a waiting sequence holds a row"
        return running + waiting
