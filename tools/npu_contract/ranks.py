"""Groups of ranks whose other members are not there: exchanges have their shapes and no content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from services.worker.model.placement import Placement
from services.worker.parallel.groups import Groups

ResultT = TypeVar("ResultT")


class ShapeGroup:
    """A group for one member on the meta device."""

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.name = name
        self.handle = name
        self.size = size
        self.rank = rank
        self.num_rows = 0
        """Rows that each member has for all members together."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """As large as `x`."""
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Longer by the members along `dim`."""
        shape = list(x.shape)
        shape[dim] *= self.size
        return x.new_empty(shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """A member's part along dimension 0."""
        assert len(x) % self.size == 0
        return x.new_empty((len(x) // self.size, *x.shape[1:]))

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """As many rows as are received."""
        assert len(received) == len(sent) == self.size
        assert sum(sent) == len(x)
        return x.new_empty((sum(received), *x.shape[1:]))

    def gather_counts(self, counts: Tensor) -> list[list[int]]:
        """The members' rows, as evenly as can be over what is counted."""
        part, rest = divmod(self.num_rows, len(counts))
        return [[part + (index < rest) for index in range(len(counts))] for _ in range(self.size)]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """As large as `x`."""
        return x

    def send(self, x: Tensor, target: int) -> None:
        """Nobody takes it."""
        assert 0 <= target < self.size
        assert target != self.rank

    def receive(self, x: Tensor, source: int) -> Tensor:
        """As large as `x`."""
        assert 0 <= source < self.size
        return x

    def fused(self, what: str, run: Callable[[], ResultT]) -> ResultT:
        """Call it."""
        return run()


def make_groups(placement: Placement, num_stages: int = 1) -> Groups:
    """The groups of the rank that a placement describes, on the last stage but for the first layer.

    Expert parallelism takes all ranks of a stage, so it tells how many replicas there are.
    """
    tp = ShapeGroup("tp", placement.tp_size, placement.tp_rank)
    ep = ShapeGroup("ep", placement.ep_size, placement.ep_rank)
    replicas = max(1, placement.ep_size // placement.tp_size)
    return Groups(
        tp=tp,
        pp=ShapeGroup("pp", num_stages, 0 if placement.is_first_stage() else num_stages - 1),
        dp=ShapeGroup("dp", replicas, placement.ep_rank // placement.tp_size),
        ep=ep,
        mc2=ShapeGroup("mc2", placement.ep_size, placement.ep_rank),
    )
