"""Where each checkpoint tensor goes: the modules declare slots, the loader fills them.

A slot is one tensor of the checkpoint and the part of it that this rank keeps. Most are one
parameter; fused and absorbed weights take several tensors, or keep a tensor in another layout than
the file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from services.worker.model.shards import Shard
from shared.errors import CheckpointError

FLOATS = frozenset({"BF16", "F16", "F32"})
"""safetensors names of the types that a float tensor may have in the file."""

Window = tuple[slice, ...]

_STRIP_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """One checkpoint tensor: its name, its shape in the file, and how it is taken in."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's, whatever part of it is kept."""
    store: Callable[[Tensor], None]
    """Takes exactly the window."""
    window: Window | None = None
    """What this rank keeps, a slice with both ends for each dimension; None: everything."""
    types: frozenset[str] = FLOATS
    is_required: bool = True
    """Whether the checkpoint must have it."""

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the window."""
        if self.window is None:
            return self.shape
        return tuple(part.stop - part.start for part in self.window)

    def also(self, other: "WeightSlot") -> "WeightSlot":
        """The same part of the same checkpoint tensor for a second place."""
        assert (self.name, self.shape, self.window) == (other.name, other.shape, other.window)

        def store(source: Tensor) -> None:
            self.store(source)
            other.store(source)

        return replace(self, store=store)


def copy_into(target: Tensor) -> Callable[[Tensor], None]:
    """Store by copying, in the target's type and on its device."""

    def store(source: Tensor) -> None:
        if _is_transposed(target):
            _copy_transposed(target.t(), source)
        else:
            target.copy_(source)

    return store


def _is_transposed(target: Tensor) -> bool:
    """Whether a matrix in host memory has its columns, not its rows, in one piece."""
    return (
        target.device.type == "cpu"
        and target.dim() == 2
        and min(target.shape) > 1
        and target.stride(0) == 1 < target.stride(1)
    )


def _copy_transposed(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source.t())``, three to six times faster.

    torch copies element by element there, a cache line for each; it has a blocked transposition for
    matrices that are contiguous. A strip of it fits the cache and fills whole lines of the target.
    """
    for first in range(0, source.shape[0], _STRIP_ROWS):
        strip = source[first : first + _STRIP_ROWS]
        target[:, first : first + _STRIP_ROWS].copy_(strip.t().contiguous())


def plain_slot(name: str, target: Tensor) -> WeightSlot:
    """A tensor that is a parameter (or a slice of one) as it stands in the file."""
    return WeightSlot(name=name, shape=tuple(target.shape), store=copy_into(target))


def matrix_slot(
    name: str, target: Tensor, part: Shard, types: frozenset[str] = FLOATS
) -> WeightSlot:
    """A rank's part of a matrix [out, in] of the file; `target` has the part's shape."""
    shape = (part.size_out, part.size_in)
    return windowed_slot(name, copy_into(target), shape, (part.rows, part.columns), types)


def column_slot(
    name: str, target: Tensor, part: Shard, types: frozenset[str] = FLOATS
) -> WeightSlot:
    """Numbers [out, 1] of a rank's part of a matrix; `target` is a vector."""
    shape = (part.size_out, 1)
    return windowed_slot(name, copy_into(target[:, None]), shape, (part.rows, slice(0, 1)), types)


def vector_slot(
    name: str, target: Tensor, part: Shard, types: frozenset[str] = FLOATS
) -> WeightSlot:
    """Numbers [out] of a rank's part of a matrix; `target` is a vector."""
    return windowed_slot(name, copy_into(target), (part.size_out,), (part.rows,), types)


def scale_slot(slot: WeightSlot) -> WeightSlot:
    """The same slot for scales: none may be negative, nor all of them zero.

    A row of zero weights may have scale zero; a whole part of them is a damaged file, which would
    serve wrong numbers without a word.
    """

    def store(source: Tensor) -> None:
        if source.numel() and (bool((source < 0).any()) or not bool(source.any())):
            raise CheckpointError(f"{slot.name}: scales must be above 0")
        slot.store(source)

    return replace(slot, store=store)


def windowed_slot(
    name: str,
    store: Callable[[Tensor], None],
    shape: tuple[int, ...],
    window: Window,
    types: frozenset[str],
) -> WeightSlot:
    """A slot for a part of a tensor; a part that is all of it needs no window."""
    is_whole = window == tuple(slice(0, size) for size in shape)
    kept = None if is_whole else window
    return WeightSlot(name=name, shape=shape, store=store, window=kept, types=types)


def ignored_slots(
    shapes: Mapping[str, tuple[int, ...]], types: frozenset[str] = FLOATS
) -> Iterator[WeightSlot]:
    """Tensors that a checkpoint may hold beside those in use; nothing of them is read."""
    for name, shape in shapes.items():
        nothing = tuple(slice(0, 0) for _ in shape)
        yield WeightSlot(
            name=name, shape=shape, store=_drop, window=nothing, types=types, is_required=False
        )


def _drop(source: Tensor) -> None:
    assert source.numel() == 0
