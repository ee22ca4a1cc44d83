"""What is read for a model: one request per tensor or file, and how one is carried out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.loading.buffers import fresh
from services.worker.loading.files import FileCursor, WeightFile
from services.worker.loading.finite import find_fault
from services.worker.loading.header import TensorEntry
from services.worker.loading.stored_types import STORED_TYPES
from services.worker.loading.window import (
    BLOCK_BYTES,
    Piece,
    Window,
    check_window,
    pieces,
    read_piece,
    window_shape,
)
from shared.errors import CheckpointError

Bytes = NDArray[np.uint8]

_NO_SCRATCH = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Bytes of one file that belong together and are handed over together."""

    name: str
    """The tensor's; empty for a whole file."""
    file: WeightFile
    base: int
    """First byte in the file that the pieces count from."""
    num_bytes: int
    pieces: tuple[Piece, ...]
    type_name: str = ""
    """Element type of values to be checked as they come; empty: they are not checked."""
    shape: tuple[int, ...] = ()


def tensor_request(entry: TensorEntry, window: Window | None) -> ReadRequest:
    """A part of a tensor."""
    kept = check_window(entry.shape, window)
    cut = tuple(pieces(entry.shape, kept, STORED_TYPES[entry.type_name].num_bytes))
    return ReadRequest(
        name=entry.name,
        file=entry.file,
        base=entry.offset,
        num_bytes=sum(piece.num_bytes for piece in cut),
        pieces=cut,
        type_name=entry.type_name,
        shape=window_shape(kept),
    )


def file_request(file: WeightFile) -> ReadRequest:
    """A file as it is."""
    cut = tuple(pieces((file.num_bytes,), (slice(0, file.num_bytes),), 1))
    return ReadRequest(name="", file=file, base=0, num_bytes=file.num_bytes, pieces=cut)


class PieceReader:
    """Carries out pieces one by one; each thread has its own."""

    def __init__(self, *, is_exact: bool = False) -> None:
        """`is_exact` as for `FileCursor`."""
        self.cursor = FileCursor(is_exact=is_exact)
        self._scratch = _NO_SCRATCH

    def read(self, request: ReadRequest, piece: Piece, target: Bytes) -> None:
        """Read a piece into the request's bytes and look at its values.

        Raises:
            CheckpointError: It cannot be read, or holds what no weight may have.
        """
        if piece.count > 1 and not self._scratch.size:
            self._scratch = fresh(BLOCK_BYTES)
        place = read_piece(
            self.cursor,
            request.file,
            request.base,
            piece,
            target,
            self._scratch,
            request.name,
        )
        check_values(request, place)

    def close(self) -> None:
        """Close the file in use, and give the scratch up."""
        self._scratch = _NO_SCRATCH
        self.cursor.close()


def check_values(request: ReadRequest, data: Bytes) -> None:
    """Refuse what no weight may have."""
    fault = find_fault(data, request.type_name) if request.type_name else None
    if fault is not None:
        raise CheckpointError(f"{request.file.path}: {request.name}: {fault}")
