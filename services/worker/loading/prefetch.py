"""Threads that read ahead of the one that uses what was read.

Laws: requests are taken up in their order, and handed over in it. A request is taken up when the
bytes read but not yet used stay within the budget, or when there are none; so one larger than the
budget is read alone, and the next to be handed over is always being read: nothing can wait for
itself. The first error of a thread ends all of them and is raised at the next hand-over. Threads do
no torch work, and have ended when `close` returns.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from services.worker.loading.buffers import BufferPool
from services.worker.loading.requests import PieceReader, ReadRequest
from services.worker.loading.window import Piece
from shared.log import get_logger

Bytes = NDArray[np.uint8]

_log = get_logger(__name__)

# A thread is in the middle of at most one block; longer than this is a file system that hangs.
_JOIN_S = 5.0

_NOTHING = np.empty(0, np.uint8)


class _Fetch:
    """A request that was taken up."""

    __slots__ = ("buffer", "next_piece", "num_left", "request")

    def __init__(self, request: ReadRequest, buffer: Bytes) -> None:
        self.request = request
        self.buffer = buffer
        self.next_piece = 0
        self.num_left = len(request.pieces)


class Prefetcher:
    """Reads requests ahead; iterating gives each with its bytes. For one thread, once."""

    def __init__(
        self, requests: Sequence[ReadRequest], *, num_threads: int, memory_bytes: int
    ) -> None:
        """Start reading.

        Args:
            requests: What to read, in order.
            num_threads: Threads that read.
            memory_bytes: Most bytes that were read and not yet used, if more than one request is.
        """
        self._requests = requests
        self._memory_bytes = memory_bytes
        self._pool = BufferPool(memory_bytes)
        self._changed = threading.Condition()
        self._fetches: dict[int, _Fetch] = {}
        self._open: _Fetch | None = None  # one with pieces that no thread has
        self._num_taken = 0
        self._held_bytes = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self.num_bytes_read = 0
        self._threads: list[threading.Thread] = []
        try:
            for index in range(num_threads):
                # Daemons, so that a file system that hangs cannot keep the process from ending.
                name = f"weights-{index}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[ReadRequest, Bytes]]:
        for index, request in enumerate(self._requests):
            yield request, self._wait_for(index)
            with self._changed:
                self._held_bytes -= request.num_bytes
                self._changed.notify_all()

    def close(self) -> None:
        """End the threads; what they are reading is finished first, nothing else is begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            _log.warning("reading does not end and is left behind", extra={"num_threads": stuck})
        self._fetches.clear()
        self._pool.clear()

    def _wait_for(self, index: int) -> Bytes:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                fetch = self._fetches.get(index)
                if fetch is not None and not fetch.num_left:
                    del self._fetches[index]
                    return fetch.buffer
                self._changed.wait()

    def _run(self) -> None:
        reader = PieceReader(is_exact=True)
        try:
            while (work := self._next()) is not None:
                fetch, piece = work
                reader.read(fetch.request, piece, fetch.buffer)
                self._finish(fetch)
                del work, fetch, piece  # the buffer is not kept while waiting for more to do
        except BaseException as error:  # noqa: BLE001  # the thread's door: the user raises it
            self._fail(error)
        finally:
            reader.close()
            with self._changed:
                self.num_bytes_read += reader.cursor.num_bytes_read

    def _next(self) -> tuple[_Fetch, Piece] | None:
        """A piece to read, once there is one; None when no more will come."""
        with self._changed:
            while not self._is_closed and self._error is None:
                fetch = self._open or self._take_up()
                if fetch is not None:
                    piece = fetch.request.pieces[fetch.next_piece]
                    fetch.next_piece += 1
                    is_given_out = fetch.next_piece == len(fetch.request.pieces)
                    self._open = None if is_given_out else fetch
                    return fetch, piece
                if self._num_taken == len(self._requests):
                    return None
                self._changed.wait()
            return None

    def _take_up(self) -> _Fetch | None:
        """The next request with something to read, if the budget has room for it."""
        while self._num_taken < len(self._requests):
            request = self._requests[self._num_taken]
            size = request.num_bytes
            if self._held_bytes and self._held_bytes + size > self._memory_bytes:
                return None
            fetch = _Fetch(request, self._pool.take(size) if size else _NOTHING)
            self._fetches[self._num_taken] = fetch
            self._num_taken += 1
            self._held_bytes += size
            if request.pieces:
                return fetch
            self._changed.notify_all()
        return None

    def _finish(self, fetch: _Fetch) -> None:
        with self._changed:
            fetch.num_left -= 1
            if not fetch.num_left:
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
