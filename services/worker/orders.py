"""What the runner's thread is told, and where it hears it.

The leader's server puts orders into a `LocalOrders`. A later rank of the same group has another
source, which yields what the leader broadcast; the runner cannot tell the difference.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.worker.plan import StepPlan, StepResult


@dataclass(slots=True, eq=False)
class Epoch:
    """A period in which scheduler and worker agree. Once over, its waiting plans are dropped."""

    number: int
    max_plans_in_flight: int
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartEpoch:
    """Free every row; plans of this epoch follow. `opened` is called on the runner's thread."""

    epoch: Epoch
    opened: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunPlan:
    """Run one plan unless its epoch is over. `answer` is called on the runner's thread."""

    epoch: Epoch
    plan: StepPlan
    answer: Callable[[StepResult], None]
    encode: Callable[[], bytes] = bytes
    """The plan as it travels to other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndEpoch:
    """Free every row unless another epoch has been started since."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop."""


Order = StartEpoch | RunPlan | EndEpoch | Stop


class OrderSource(Protocol):
    """Yields orders, the same ones in the same order on every rank of a group."""

    def get(self) -> Order:
        """Wait for the next order."""
        ...


class LocalOrders:
    """Orders of the server in this process. Bounded by the window of plans in flight."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def put(self, order: Order) -> None:
        """Give an order; never waits."""
        self._queue.put(order)

    def get(self) -> Order:
        """Wait for the next order."""
        return self._queue.get()
