"""What each tenant was served, so that the one who got least comes next.

A counter of a tenant grows by what it was served, in whatever unit. A tenant that comes back is
lifted to the least counter of those that are there: time without requests earns no credit, and a
short pause does not clear a debt, since counters above that are remembered.

Law: a tenant that is there is never forgotten, and of the others at most `max_idle` are kept.
"""

from typing import Final

MAX_IDLE: Final = 4096


class Shares:
    """Counters of tenants; the empty tenant id is one like any other."""

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        """Nobody was served."""
        self._max_idle = max_idle
        self._served: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        # Least counter of the tenants that are there, or of those that left last.
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant_id: str) -> float:
        """What a tenant got."""
        return self._served.get(tenant_id, self._floor)

    def enter(self, tenant_id: str) -> None:
        """One more of the tenant's is there."""
        count = self._num_live.get(tenant_id, 0)
        if not count:
            self._raise_floor()
            self._served[tenant_id] = max(self.served(tenant_id), self._floor)
        self._num_live[tenant_id] = count + 1

    def leave(self, tenant_id: str) -> None:
        """One of the tenant's is gone."""
        count = self._num_live[tenant_id] - 1
        if count:
            self._num_live[tenant_id] = count
            return
        self._raise_floor()
        del self._num_live[tenant_id]
        if len(self._served) - len(self._num_live) > self._max_idle:
            self._forget()

    def charge(self, tenant_id: str, amount: float) -> None:
        """A tenant that is there was served so much."""
        self._served[tenant_id] += amount

    def _raise_floor(self) -> None:
        if self._num_live:
            self._floor = max(self._floor, min(self._served[t] for t in self._num_live))

    def _forget(self) -> None:
        """Keep half of the idle ones: those that are furthest ahead of the others."""
        idle = [t for t in self._served if t not in self._num_live]
        idle.sort(key=self._served.__getitem__)
        for tenant_id in idle[: len(idle) - self._max_idle // 2]:
            del self._served[tenant_id]
