"""An open checkpoint: what is in it, and any part of any tensor.

Reading one tensor and reading a whole model are the same requests; they differ in who carries them
out (`strategy.py`). Tensors that are handed out belong to whoever got them.
"""

from collections.abc import Generator, Mapping
from contextlib import closing
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.loading.buffers import BufferPool
from services.worker.loading.header import TensorEntry
from services.worker.loading.layout import read_entries
from services.worker.loading.prefetch import Prefetcher
from services.worker.loading.requests import (
    PieceReader,
    ReadRequest,
    check_values,
    file_request,
    tensor_request,
)
from services.worker.loading.stored_types import STORED_TYPES
from services.worker.loading.strategy import LoadStrategy, ReadMode
from services.worker.loading.window import Window, check_window
from shared.errors import CheckpointError

Bytes = NDArray[np.uint8]


class CheckpointReader:
    """Reads tensors of one directory. One caller at a time."""

    def __init__(self, path: Path | str) -> None:
        """Read and check every header.

        Raises:
            CheckpointError: A file is missing, damaged, or disagrees with the index.
        """
        self.path = Path(path)
        self._entries = read_entries(self.path)
        self._reader = PieceReader()
        self._num_bytes_ahead = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file in use; reading again opens it again."""
        self._reader.close()

    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor by name, in the order in which reading is fastest."""
        return MappingProxyType(self._entries)

    @property
    def num_bytes_read(self) -> int:
        """Bytes of weights read so far, those of gaps between parts included."""
        return self._reader.cursor.num_bytes_read + self._num_bytes_ahead

    def read(self, name: str, window: Window | None = None) -> Tensor:
        """A tensor, or the part of it in `window` (a slice with both ends for each dimension).

        Raises:
            CheckpointError: It is not in the checkpoint, cannot be read, or is not finite.
        """
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: {name}: is missing")
        request = tensor_request(self._entries[name], window)
        return _as_tensor(request, self._carry_out(request, np.empty(request.num_bytes, np.uint8)))

    def read_all(
        self, wanted: Mapping[str, Window | None], strategy: LoadStrategy
    ) -> Generator[tuple[str, Tensor]]:
        """Parts of many tensors, in the order of `entries`; close it if it is not used up.

        Args:
            wanted: The part of each tensor; all of them are in the checkpoint.
            strategy: How to read, with everything decided.
        """
        ordered = [entry for name, entry in self._entries.items() if name in wanted]
        assert len(ordered) == len(wanted)
        if strategy.mode is ReadMode.EAGER:
            yield from self._read_files(ordered, wanted, strategy)
            return
        requests = [tensor_request(entry, wanted[entry.name]) for entry in ordered]
        if strategy.mode is ReadMode.PREFETCH:
            read = self._read_ahead(requests, strategy)
        else:
            read = self._read_in_order(requests, strategy)
        # A loop of ours would keep a tensor while the next one is waited for.
        with closing(read):
            yield from map(_named, read)

    def _read_in_order(
        self, requests: list[ReadRequest], strategy: LoadStrategy
    ) -> Generator[tuple[ReadRequest, Bytes]]:
        pool = BufferPool(strategy.memory_bytes)
        for request in requests:
            data = pool.take(request.num_bytes) if request.num_bytes else np.empty(0, np.uint8)
            yield request, self._carry_out(request, data)
            del data

    def _carry_out(self, request: ReadRequest, data: Bytes) -> Bytes:
        for piece in request.pieces:
            self._reader.read(request, piece, data)
        return data

    def _read_ahead(
        self, requests: list[ReadRequest], strategy: LoadStrategy
    ) -> Generator[tuple[ReadRequest, Bytes]]:
        threads = Prefetcher(
            requests, num_threads=strategy.num_threads, memory_bytes=strategy.memory_bytes
        )
        try:
            yield from threads
        finally:
            threads.close()
            self._num_bytes_ahead += threads.num_bytes_read

    def _read_files(
        self,
        ordered: list[TensorEntry],
        wanted: Mapping[str, Window | None],
        strategy: LoadStrategy,
    ) -> Generator[tuple[str, Tensor]]:
        """Whole files, and the parts out of them."""
        by_file = [list(group) for _, group in groupby(ordered, key=lambda entry: entry.file)]
        requests = [file_request(entries[0].file) for entries in by_file]
        with closing(self._read_ahead(requests, strategy)) as files:
            for entries in by_file:
                _, data = next(files)
                for entry in entries:
                    yield entry.name, _cut_out(entry, wanted[entry.name], data)
                del data  # before the next file is waited for


def _cut_out(entry: TensorEntry, window: Window | None, file_data: Bytes) -> Tensor:
    """A part of a tensor out of the bytes of its file."""
    request = tensor_request(entry, window)
    stored = STORED_TYPES[entry.type_name]
    whole = file_data[entry.offset : entry.offset + entry.num_bytes]
    shaped = whole.reshape(*entry.shape, stored.num_bytes)
    part = np.ascontiguousarray(shaped[check_window(entry.shape, window)]).reshape(-1)
    if part.ctypes.data % stored.num_bytes:
        part = part.copy()
    check_values(request, part)
    return _as_tensor(request, part)


def _named(read: tuple[ReadRequest, Bytes]) -> tuple[str, Tensor]:
    request, data = read
    return request.name, _as_tensor(request, data)


def _as_tensor(request: ReadRequest, data: Bytes) -> Tensor:
    dtype = STORED_TYPES[request.type_name].dtype
    if not data.size:
        return torch.empty(request.shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).view(request.shape)
