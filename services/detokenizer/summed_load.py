"""The snapshots of all schedulers as one, for frontends: sums that survive a lost scheduler.

Counters only grow: what a scheduler counted stays in them when it is lost, and when it starts anew
its counters are added to those of its earlier run, replica by replica. Replicas keep their
numbers: those of a lost scheduler are shown as lost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Final

from shared.sampling import LoadSnapshot, ReplicaLoad

# Of one scheduler or of its replicas alone; sums of these mean nothing.
_NOT_SUMMED: Final = frozenset(
    {
        "max_model_len",
        "max_gc_pause_us",
        "block_size_tokens",
        "num_schedulers",
        "num_reached_schedulers",
    }
)
_NAMES: Final = tuple(
    field.name
    for field in fields(LoadSnapshot)
    if field.type is int and field.name not in _NOT_SUMMED
)
_COUNTERS: Final = tuple(name for name in _NAMES if name.endswith("_total"))
_OF_REPLICAS: Final = tuple(
    field.name for field in fields(ReplicaLoad) if field.name.endswith("_total")
)
_POSITIONS: Final = "num_accepted_tokens_per_position"


class SummedLoad:
    """What is known of a fixed number of schedulers."""

    def __init__(self, num_schedulers: int) -> None:
        """Nothing is known yet."""
        self._latest: list[LoadSnapshot | None] = [None] * num_schedulers
        # What earlier runs counted.
        self._past = [LoadSnapshot()] * num_schedulers
        self._is_reached = [False] * num_schedulers

    def take(self, number: int, load: LoadSnapshot) -> bool:
        """A snapshot came; whether it is the first of another run than the last one."""
        before, self._latest[number] = self._latest[number], load
        self._is_reached[number] = True
        for other, known in enumerate(self._latest):
            # The same run was known by another address before: it counts once.
            is_same = known is not None and known.instance_id == load.instance_id != ""
            if other != number and is_same and not self._is_reached[other]:
                self._latest[other] = None
        is_other_run = before is not None and before.instance_id != load.instance_id
        if before is not None and is_other_run:
            past = self._past[number]
            replicas = _replicas_counted(past.replicas, before.replicas)
            self._past[number] = replace(_counted(past, before), replicas=tuple(replicas))
        return is_other_run

    def lose(self, number: int) -> None:
        """The scheduler cannot be reached."""
        self._is_reached[number] = False

    def sum(self) -> LoadSnapshot:
        """All of them."""
        reached, lost = self._latest_of(is_reached=True), self._latest_of(is_reached=False)
        totals = LoadSnapshot()
        for load in (*self._past, *reached, *lost):
            totals = _counted(totals, load)
        gauges = {
            name: sum(getattr(load, name) for load in reached)
            for name in _NAMES
            if name not in _COUNTERS
        }
        lengths = [load.max_model_len for load in reached if load.max_model_len]
        return replace(
            totals,
            **gauges,
            # What is taken in must fit wherever it goes.
            max_model_len=min(lengths, default=0),
            is_worker_ready=any(load.is_worker_ready and not load.is_draining for load in reached),
            is_draining=bool(reached) and all(load.is_draining for load in reached),
            model_digest=next((load.model_digest for load in reached if load.model_digest), ""),
            block_size_tokens=next(
                (load.block_size_tokens for load in reached if load.block_size_tokens), 0
            ),
            replicas=tuple(self._replicas()),
            num_schedulers=len(self._latest),
            num_reached_schedulers=len(reached),
        )

    def _latest_of(self, *, is_reached: bool) -> list[LoadSnapshot]:
        pairs = zip(self._latest, self._is_reached, strict=True)
        return [load for load, flag in pairs if load is not None and flag is is_reached]

    def _replicas(self) -> Iterable[ReplicaLoad]:
        known = zip(self._latest, self._past, self._is_reached, strict=True)
        for load, past, is_reached in known:
            latest = load.replicas if load is not None else ()
            for replica in _replicas_counted(past.replicas, latest):
                if is_reached:
                    yield replica
                else:
                    yield replace(
                        replica, is_ready=False, num_running=0, num_waiting=0, num_free_blocks=0
                    )


def _counted(a: LoadSnapshot, b: LoadSnapshot) -> LoadSnapshot:
    """The counters of both, and the longer of their longest pauses."""
    pairs = zip_longest(getattr(a, _POSITIONS), getattr(b, _POSITIONS), fillvalue=0)
    sums = {name: getattr(a, name) + getattr(b, name) for name in _COUNTERS}
    return LoadSnapshot(
        num_accepted_tokens_per_position=tuple(x + y for x, y in pairs),
        max_gc_pause_us=max(a.max_gc_pause_us, b.max_gc_pause_us),
        **sums,
    )


def _replicas_counted(
    past: Sequence[ReplicaLoad], latest: Sequence[ReplicaLoad]
) -> Iterable[ReplicaLoad]:
    """The latest state of replicas, with what earlier ones of their numbers counted."""
    for before, now in zip_longest(past, latest, fillvalue=ReplicaLoad()):
        sums = {name: getattr(before, name) + getattr(now, name) for name in _OF_REPLICAS}
        yield replace(now, **sums)
