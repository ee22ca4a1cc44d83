"""Groups of threads in one process: what ranks exchange, without processes."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_PATIENCE_S = 20.0


class ThreadGroup:
    """One member's view of a group."""

    def __init__(self, name: str, meeting: "_Meeting", rank: int) -> None:
        self.name, self.handle = name, name
        self.size, self.rank = meeting.size, rank
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._meeting.swap(self.rank, x)).sum(0))

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat(self._meeting.swap(self.rank, x), dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        total = torch.stack(self._meeting.swap(self.rank, x)).sum(0)
        return total.chunk(self.size)[self.rank].clone()

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        parts = self._meeting.swap(self.rank, x.split(list(sent)))
        mine = [part[self.rank] for part in parts]
        assert [len(part) for part in mine] == list(received)
        return torch.cat(mine)

    def gather_counts(self, counts: Tensor) -> list[list[int]]:
        return [found.tolist() for found in self._meeting.swap(self.rank, counts)]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._meeting.swap(self.rank, x)[source])

    def send(self, x: Tensor, target: int) -> None:
        self._meeting.mail[self.rank, target].put(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        found = self._meeting.mail[source, self.rank].get(timeout=_PATIENCE_S)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        return x.copy_(found)

    def fused(self, what: str, run: Callable[[], Any]) -> Any:
        return run()


class _Meeting:
    """Where the members of one group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self._barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self._values: list[Any] = [None] * size

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Everyone's value."""
        self._values[rank] = value.clone() if isinstance(value, Tensor) else value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


def make_groups(name: str, size: int) -> list[ThreadGroup]:
    """The members of a group, in order."""
    meeting = _Meeting(size)
    return [ThreadGroup(name, meeting, rank) for rank in range(size)]


def run_together(work: Callable[[int], Any], size: int) -> list[Any]:
    """What each rank's work returns; the first error of any is raised."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))
