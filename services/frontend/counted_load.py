"""Counters that detokenizers tell, as this gateway counts them: they never fall.

Every detokenizer adds up the same schedulers, but began to do so at another time, and what it knew
is gone with it. So its numbers are no totals here; what they grow by is.

Law: what schedulers count grows by what one detokenizer says, the source, until that is lost. What
another one said since the source spoke last is kept for that moment. Detokenizers' own counters
grow by what each says.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Final, TypeAlias

from shared.sampling import LoadSnapshot, ReplicaLoad

# What each detokenizer counts of its own, beside what its schedulers tell it.
_OWN: Final = frozenset(
    {"num_scheduler_losses_total", "num_resubmissions_total", "num_unresumed_total"}
)
_SHARED: Final = tuple(
    field.name
    for field in fields(LoadSnapshot)
    if field.name.endswith("_total") and field.name not in _OWN
)
_POSITIONS: Final = "num_accepted_tokens_per_position"
_OF_REPLICAS: Final = tuple(
    field.name for field in fields(ReplicaLoad) if field.name.endswith("_total")
)

# Name of a counter, and its place where there are several.
Key: TypeAlias = tuple[str, int]
Counts: TypeAlias = dict[Key, int]


class _Teller:
    """One detokenizer: what it said last, and how far that is ahead of the totals."""

    def __init__(self) -> None:
        self.instance_id: str | None = None
        self.num_known = 0
        self.own: Counts = {}
        self.shared: Counts = {}
        self.ahead: Counts = {}


class CountedLoad:
    """Totals over a fixed number of detokenizers.

    Args:
        num_tellers: Detokenizers.
        rank: How good a source one is now; the best that speaks is taken.
    """

    def __init__(self, num_tellers: int, rank: Callable[[int], int]) -> None:
        """Nothing was told."""
        self._rank = rank
        self._tellers = [_Teller() for _ in range(num_tellers)]
        self._source: int | None = None
        # The run that sets the scale: its counts from before our time are shown.
        self._first: tuple[int, str] | None = None
        self._totals: Counts = {}
        self._shown: tuple[LoadSnapshot, LoadSnapshot] | None = None

    def take(self, number: int, load: LoadSnapshot) -> None:
        """A detokenizer told."""
        self._shown = None
        teller = self._tellers[number]
        own = {(name, 0): getattr(load, name) for name in _OWN}
        is_other_run = teller.instance_id != load.instance_id or any(
            count < teller.own.get(key, 0) for key, count in own.items()
        )
        _add(self._totals, own if is_other_run else _growth(teller.own, own))
        shared = dict(_shared_of(load))
        grown = self._grown(number, load, shared, is_other_run=is_other_run)
        teller.instance_id, teller.own, teller.shared = load.instance_id, own, shared
        _add(teller.ahead, grown)
        if self._source is None or self._rank(number) > self._rank(self._source):
            self._source = number
        if number == self._source:
            self._take_source(teller)

    def shown(self, latest: LoadSnapshot) -> LoadSnapshot:
        """A snapshot with these counters."""
        if self._shown is None or self._shown[0] is not latest:
            self._shown = latest, self._counted(latest)
        return self._shown[1]

    def _take_source(self, source: _Teller) -> None:
        """What it is ahead of the totals joins them.

        Others will say the same, or have just said it: what they lack of it they have yet to make
        up, at most this much.
        """
        counted = {key: max(0, count) for key, count in source.ahead.items()}
        _add(self._totals, counted)
        for one in self._tellers:
            for key, count in counted.items():
                ahead = one.ahead.get(key, 0) - count
                one.ahead[key] = min(0, ahead if one is source else max(-count, ahead))

    def _grown(
        self, number: int, load: LoadSnapshot, shared: Counts, *, is_other_run: bool
    ) -> Counts:
        """What schedulers counted since this detokenizer spoke last, as far as it can tell.

        Where it begins, or learns of a scheduler, its numbers leap by what was counted long ago.
        """
        teller = self._tellers[number]
        if self._first is None:
            self._first = number, load.instance_id
        is_leap = is_other_run or load.num_reached_schedulers > teller.num_known
        known = 0 if is_other_run else teller.num_known
        teller.num_known = max(known, load.num_reached_schedulers)
        if is_leap and self._first != (number, load.instance_id):
            teller.ahead = {}
            return {}
        return _growth(teller.shared, shared)

    def _counted(self, latest: LoadSnapshot) -> LoadSnapshot:
        totals = self._totals
        positions = sum(name == _POSITIONS for name, _ in totals)
        counts: dict[str, Any] = {name: totals.get((name, 0), 0) for name in (*_SHARED, *_OWN)}
        return replace(
            latest,
            num_accepted_tokens_per_position=tuple(totals[_POSITIONS, i] for i in range(positions)),
            replicas=tuple(
                self._replica_counted(i, replica) for i, replica in enumerate(latest.replicas)
            ),
            **counts,
        )

    def _replica_counted(self, number: int, latest: ReplicaLoad) -> ReplicaLoad:
        counts: dict[str, Any] = {
            name: self._totals.get((_key(name), number), 0) for name in _OF_REPLICAS
        }
        return replace(latest, **counts)


def _shared_of(load: LoadSnapshot) -> Iterator[tuple[Key, int]]:
    for name in _SHARED:
        yield (name, 0), getattr(load, name)
    for i, count in enumerate(load.num_accepted_tokens_per_position):
        yield (_POSITIONS, i), count
    for i, replica in enumerate(load.replicas):
        for name in _OF_REPLICAS:
            yield (_key(name), i), getattr(replica, name)


def _key(name: str) -> str:
    """Of a replica's counter; the schedulers' own have the same names."""
    return f"replicas.{name}"


def _growth(before: Counts, now: Counts) -> Counts:
    return {key: max(0, count - before.get(key, 0)) for key, count in now.items()}


def _add(totals: Counts, counts: Counts) -> None:
    for key, count in counts.items():
        totals[key] = totals.get(key, 0) + count
