"""Where each checkpoint tensor goes: the modules declare slots, the loader fills them.

A slot is one tensor of the checkpoint. Most are one parameter; fused and absorbed weights take
several tensors, or keep a tensor in another layout than the file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """One checkpoint tensor: its name, its shape in the file, and how it is taken in."""

    name: str
    shape: tuple[int, ...]
    store: Callable[[Tensor], None]

    def also(self, other: "WeightSlot") -> "WeightSlot":
        """The same checkpoint tensor for a second place."""

        def store(source: Tensor) -> None:
            self.store(source)
            other.store(source)

        return WeightSlot(name=self.name, shape=self.shape, store=store)


def copy_into(target: Tensor) -> Callable[[Tensor], None]:
    """Store by copying, in the target's type and on its device."""

    def store(source: Tensor) -> None:
        target.copy_(source)

    return store


def plain_slot(name: str, target: Tensor) -> WeightSlot:
    """A tensor that is a parameter (or a slice of one) as it stands in the file."""
    return WeightSlot(name=name, shape=tuple(target.shape), store=copy_into(target))


def transposed_slot(name: str, target: Tensor) -> WeightSlot:
    """A matrix [out, in] of the file that is kept as [in, out]."""
    rows, columns = target.shape
    return WeightSlot(name=name, shape=(columns, rows), store=copy_into(target.t()))


def stacked_slots(prefix: str, parts: dict[str, int], weight: Tensor) -> Iterator[WeightSlot]:
    """Matrices that share one input, side by side in `weight` [in, out]: name -> columns."""
    first = 0
    for name, columns in parts.items():
        yield transposed_slot(f"{prefix}{name}.weight", weight[:, first : first + columns])
        first += columns
