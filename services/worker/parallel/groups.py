"""Exchanges between the ranks of a group, and the groups that a rank belongs to.

One call site for HCCL on an NPU and Gloo on a CPU. Every member makes the same calls in the same
order with the same shapes; nothing here checks that, a mistake is a wait that only the timeout
ends. Results are the same bits on every member. The model is built so that a group of one rank is
never called in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, distributed

from services.worker.parallel.progress import Progress

ResultT = TypeVar("ResultT")


class Group(Protocol):
    """Ranks that exchange tensors; a rank's number here is its place among the members."""

    @property
    def name(self) -> str:
        """As in `Topology.groups`."""
        ...

    @property
    def size(self) -> int:
        """Members."""
        ...

    @property
    def rank(self) -> int:
        """This rank's place."""
        ...

    @property
    def handle(self) -> str:
        """The name by which operators that communicate by themselves know the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the members, written into `x`."""
        ...

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The members' tensors side by side along `dim`, in order."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part, along dimension 0, of the sum over the members."""
        ...

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows to member r, in order, and get `received[r]` from each."""
        ...

    def gather_counts(self, counts: Tensor) -> list[list[int]]:
        """The members' counts on the host, which waits for them."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` with that of member `source`."""
        ...

    def send(self, x: Tensor, target: int) -> None:
        """Give `x` to member `target`, which receives it."""
        ...

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` with what member `source` sends."""
        ...

    def fused(self, what: str, run: Callable[[], ResultT]) -> ResultT:
        """Call an operator that communicates by itself, under the group's `handle`."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """A group of one: it has everything already."""

    name: str
    size: int = 1
    rank: int = 0
    handle: str = ""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of one."""
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """All there is."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """All of the sum."""
        return x

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """What it sends it gets."""
        return x

    def gather_counts(self, counts: Tensor) -> list[list[int]]:
        """Its own."""
        return [counts.tolist()]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Its own."""
        return x

    def send(self, x: Tensor, target: int) -> None:
        """There is nobody."""
        raise AssertionError(f"group {self.name} has no member {target}")

    def receive(self, x: Tensor, source: int) -> Tensor:
        """There is nobody."""
        raise AssertionError(f"group {self.name} has no member {source}")

    def fused(self, what: str, run: Callable[[], ResultT]) -> ResultT:
        """Call it."""
        return run()


class RankGroup:
    """A group of several ranks on a process group of torch."""

    def __init__(
        self,
        name: str,
        process_group: distributed.ProcessGroup,
        progress: Progress,
        handle: str,
    ) -> None:
        self.name = name
        self.handle = handle
        self.size = process_group.size()
        self.rank = process_group.rank()
        self._group = process_group
        self._progress = progress

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the members, written into `x`."""
        self._progress.enter(f"{self.name}.all_reduce")
        distributed.all_reduce(x, group=self._group)
        self._progress.leave()
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The members' tensors side by side along `dim`, in order."""
        self._progress.enter(f"{self.name}.all_gather")
        rows, *rest = x.shape
        gathered = x.new_empty((self.size * rows, *rest))
        distributed.all_gather_single(gathered, x.contiguous(), group=self._group)
        self._progress.leave()
        if dim == 0:
            return gathered
        return torch.cat(gathered.chunk(self.size), dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part, along dimension 0, of the sum over the members."""
        self._progress.enter(f"{self.name}.reduce_scatter")
        rows, *rest = x.shape
        part = x.new_empty((rows // self.size, *rest))
        distributed.reduce_scatter_single(part, x.contiguous(), group=self._group)
        self._progress.leave()
        return part

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows to member r, in order, and get `received[r]` from each."""
        self._progress.enter(f"{self.name}.all_to_all")
        arrived = x.new_empty((sum(received), *x.shape[1:]))
        distributed.all_to_all_single(
            arrived, x.contiguous(), list(received), list(sent), group=self._group
        )
        self._progress.leave()
        return arrived

    def gather_counts(self, counts: Tensor) -> list[list[int]]:
        """The members' counts on the host, which waits for them."""
        found: list[list[int]] = self.all_gather(counts[None]).tolist()
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` with that of member `source`."""
        self._progress.enter(f"{self.name}.broadcast")
        distributed.broadcast(x, group=self._group, group_src=source)
        self._progress.leave()
        return x

    def send(self, x: Tensor, target: int) -> None:
        """Give `x` to member `target`, which receives it."""
        self._progress.enter(f"{self.name}.send")
        distributed.send(x.contiguous(), group=self._group, group_dst=target)
        self._progress.leave()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` with what member `source` sends."""
        self._progress.enter(f"{self.name}.receive")
        distributed.recv(x, group=self._group, group_src=source)
        self._progress.leave()
        return x

    def fused(self, what: str, run: Callable[[], ResultT]) -> ResultT:
        """Call an operator that communicates by itself, under the group's `handle`."""
        self._progress.enter(f"{self.name}.{what}")
        result = run()
        self._progress.leave()
        return result


def _alone(name: str) -> Group:
    return OneRank(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of one rank; by default it is alone, whatever part of a model it holds."""

    tp: Group = field(default_factory=lambda: _alone("tp"))
    """Ranks that hold parts of the same layers of the same replica."""
    pp: Group = field(default_factory=lambda: _alone("pp"))
    """Ranks with the same place in each stage; the place here is the stage."""
    dp: Group = field(default_factory=lambda: _alone("dp"))
    """Ranks with the same place in each replica; the place here is the replica."""
    ep: Group = field(default_factory=lambda: _alone("ep"))
    """Ranks of a stage over all replicas, which share out the experts."""
    mc2: Group = field(default_factory=lambda: _alone("mc2"))
    """The same ranks once more, for the fused operators alone."""
    replica: Group = field(default_factory=lambda: _alone("replica"))
    """All ranks of a replica, over tensors in host memory; member 0 leads."""
    orders: Group = field(default_factory=lambda: _alone("orders"))
    """The same ranks once more, in whose exchanges the others wait for their leader's orders."""
