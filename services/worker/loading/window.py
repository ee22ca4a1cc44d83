"""Which bytes of a file make up a part of a tensor, as few and as long reads as make sense.

A part is a rectangle: one slice per dimension. Its bytes lie in runs. Whole rows are one run and
are read straight to their place. Parts of rows are many runs: where the bytes between two runs are
few, reading them too and dropping them is faster than a call (from a cold disk: a request) for each
run, so whole spans go to a scratch buffer of bounded size and the runs are taken from it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.loading.files import FileCursor, WeightFile

Bytes = NDArray[np.uint8]
Window = tuple[slice, ...]

BLOCK_BYTES = 16 << 20
"""Most bytes read by one call, and most bytes of scratch."""

# Below this many bytes between two runs they are read as one span.
_MAX_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` runs of `run` bytes, `stride` bytes apart in the file, side by side in the target."""

    target: int
    offset: int
    count: int
    stride: int
    run: int

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return self.count * self.run


def check_window(shape: Sequence[int], window: Window | None) -> Window:
    """The window with both ends of each slice; a wrong one is a fault of the caller."""
    if window is None:
        return tuple(slice(0, size) for size in shape)
    assert len(window) == len(shape), f"window {window} for shape {shape}"
    for part, size in zip(window, shape, strict=True):
        assert part.step in {None, 1}, f"window {window} has steps"
        assert 0 <= part.start <= part.stop <= size, f"window {window} for shape {shape}"
    return window


def window_shape(window: Window) -> tuple[int, ...]:
    """Shape of the part."""
    return tuple(part.stop - part.start for part in window)


def pieces(
    shape: Sequence[int], window: Window, item_bytes: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[Piece]:
    """The part's bytes in the order of the file, cut into pieces that one thread reads at a time.

    Args:
        shape: The whole tensor's.
        window: The part, as `check_window` returns it.
        item_bytes: Bytes of an element.
        block_bytes: Most bytes of a piece; offsets count from the tensor's first byte.
    """
    kept = window_shape(window)
    if not math.prod(kept):
        return
    strides = [item_bytes] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    # Behind `axis` everything is kept, so a row of `axis` is one run.
    axis = len(shape) - 1
    while axis > 0 and kept[axis] == shape[axis]:
        axis -= 1
    start = sum(part.start * stride for part, stride in zip(window, strides, strict=True))
    if axis < 0:
        yield Piece(target=0, offset=0, count=1, stride=item_bytes, run=item_bytes)
        return
    run = kept[axis] * strides[axis]
    rows, row_stride = (kept[axis - 1], strides[axis - 1]) if axis else (1, run)
    outer = [range(count) for count in kept[: max(0, axis - 1)]]
    target = 0
    for places in itertools.product(*outer):
        shift = sum(place * stride for place, stride in zip(places, strides, strict=False))
        yield from _cut(Piece(target, start + shift, rows, row_stride, run), block_bytes)
        target += rows * run


def _cut(piece: Piece, block_bytes: int) -> Iterator[Piece]:
    """Smaller pieces of the same bytes."""
    is_dense = piece.stride - piece.run <= _MAX_GAP_BYTES and 2 * piece.stride <= block_bytes
    if piece.count > 1 and is_dense:
        per_block = max(1, block_bytes // piece.stride)
        for first in range(0, piece.count, per_block):
            yield Piece(
                target=piece.target + first * piece.run,
                offset=piece.offset + first * piece.stride,
                count=min(per_block, piece.count - first),
                stride=piece.stride,
                run=piece.run,
            )
        return
    for row in range(piece.count):
        for first in range(0, piece.run, block_bytes):
            run = min(block_bytes, piece.run - first)
            yield Piece(
                target=piece.target + row * piece.run + first,
                offset=piece.offset + row * piece.stride + first,
                count=1,
                stride=run,
                run=run,
            )


def read_piece(
    cursor: FileCursor,
    file: WeightFile,
    base: int,
    piece: Piece,
    target: Bytes,
    scratch: Bytes,
    name: str = "",
) -> Bytes:
    """Read a piece to its place in `target`; returns that place.

    Args:
        cursor: Reads the file.
        file: Where the tensor is.
        base: The tensor's first byte in it.
        piece: What to read.
        target: The part's bytes.
        scratch: At least a block of bytes, for spans with gaps.
        name: The tensor's, for messages.
    """
    place = target[piece.target : piece.target + piece.num_bytes]
    if piece.count == 1:
        cursor.read(file, base + piece.offset, place, name)
        return place
    span = scratch[: (piece.count - 1) * piece.stride + piece.run]
    cursor.read(file, base + piece.offset, span, name)
    shape, strides = (piece.count, piece.run), (piece.stride, 1)
    np.copyto(place.reshape(shape), np.ndarray(shape, np.uint8, span.data, 0, strides))
    return place
