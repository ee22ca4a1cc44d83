"""Reading ahead: in order, within the budget, and ended by whatever goes wrong."""

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.worker.loading import prefetch as module
from services.worker.loading.files import open_regular
from services.worker.loading.header import read_header
from services.worker.loading.prefetch import Prefetcher
from services.worker.loading.requests import PieceReader, ReadRequest, tensor_request
from services.worker.loading.window import Piece
from shared.errors import CheckpointError

SIZE = 1000


def living() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("weights-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not living()


@pytest.fixture
def requests(tmp_path: Path) -> list[ReadRequest]:
    """Twenty tensors of a thousand bytes, one of three thousand, one of none."""
    tensors = {f"t{index:02}": torch.full((SIZE,), index, dtype=torch.uint8) for index in range(20)}
    tensors["t20"] = torch.full((3 * SIZE,), 20, dtype=torch.uint8)
    tensors["t21"] = torch.empty(0, dtype=torch.uint8)
    save_file(tensors, tmp_path / "file")
    return [tensor_request(entry, None) for entry in read_header(tmp_path / "file")]


Spy = Callable[[Callable[[ReadRequest, Piece], None]], None]


@pytest.fixture
def on_read(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Call a function before each piece is read, in the thread that reads it."""
    read = PieceReader.read

    def install(call: Callable[[ReadRequest, Piece], None]) -> None:
        def spy(self: PieceReader, request: ReadRequest, piece: Piece, data: np.ndarray) -> None:
            call(request, piece)
            read(self, request, piece, data)

        monkeypatch.setattr(PieceReader, "read", spy)

    return install


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("memory_bytes", [1, 2500, 1 << 20])
def test_everything_arrives_in_order(
    requests: list[ReadRequest], num_threads: int, memory_bytes: int
) -> None:
    with Prefetcher(requests, num_threads=num_threads, memory_bytes=memory_bytes) as threads:
        for expected, (request, data) in zip(requests, threads, strict=True):
            assert request is expected
            assert data.nbytes == request.num_bytes
            assert (data == int(request.name[1:])).all()
    assert threads.num_bytes_read == sum(request.num_bytes for request in requests)


def test_pieces_of_one_tensor_are_read_by_several_threads(tmp_path: Path, on_read: Spy) -> None:
    tensor = torch.arange(64 << 20, dtype=torch.uint8)
    save_file({"a": tensor}, tmp_path / "file")
    (entry,) = read_header(tmp_path / "file")
    both = threading.Barrier(2, timeout=20)
    on_read(lambda *_: both.wait() and None)  # passes only if two are in it at once
    with Prefetcher([tensor_request(entry, None)], num_threads=2, memory_bytes=1) as threads:
        ((_, data),) = threads
    assert np.array_equal(data, tensor.numpy())


@pytest.mark.parametrize("budget", [1, SIZE, 3 * SIZE, 5 * SIZE])
def test_no_more_is_read_ahead_than_the_budget(
    requests: list[ReadRequest], on_read: Spy, budget: int
) -> None:
    used = 0
    most = [0]

    def look(request: ReadRequest, _: Piece) -> None:
        index = requests.index(request)
        most[0] = max(most[0], sum(one.num_bytes for one in requests[used : index + 1]))

    on_read(look)
    with Prefetcher(requests, num_threads=4, memory_bytes=budget) as threads:
        for _, data in threads:
            time.sleep(0.002)  # long enough that threads would run ahead if they could
            del data
            used += 1
    assert most[0] <= max(budget, 3 * SIZE)
    assert most[0] >= min(budget, 3 * SIZE)


@pytest.mark.parametrize("failing", [0, 7, 21 - 1])
@pytest.mark.parametrize("error", [CheckpointError("file: t: reason"), ValueError("a bug")])
def test_an_error_in_a_thread_ends_reading_for_all(
    requests: list[ReadRequest], on_read: Spy, failing: int, error: Exception
) -> None:
    def fail(request: ReadRequest, _: Piece) -> None:
        if request is requests[failing]:
            raise error

    on_read(fail)
    seen: list[ReadRequest] = []
    threads = Prefetcher(requests, num_threads=3, memory_bytes=1 << 20)
    with pytest.raises(type(error), match=str(error)), threads:
        seen.extend(request for request, _ in threads)
    assert seen == requests[: len(seen)]
    assert len(seen) <= failing


@pytest.mark.parametrize("num_used", [0, 3])
def test_whoever_stops_early_leaves_no_thread(requests: list[ReadRequest], num_used: int) -> None:
    with Prefetcher(requests, num_threads=4, memory_bytes=2 * SIZE) as threads:
        for count, _ in enumerate(threads, 1):
            if count >= num_used:
                break
    assert not living()


def test_threads_end_when_all_is_read_even_before_it_is_used(requests: list[ReadRequest]) -> None:
    with Prefetcher(requests, num_threads=4, memory_bytes=1 << 20) as threads:
        until = time.monotonic() + 20
        while living() and time.monotonic() < until:
            time.sleep(0.001)
        assert not living()
        assert len(list(threads)) == len(requests)


def test_no_thread_stays_where_not_all_can_be_started(
    requests: list[ReadRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Prefetcher(requests, num_threads=4, memory_bytes=1)
    assert len(started) == 2
    assert not living()


def test_storage_that_hangs_does_not_keep_the_loader(
    requests: list[ReadRequest], on_read: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_JOIN_S", 0.05)
    hanging, released = threading.Semaphore(0), threading.Event()

    def hang(*_: object) -> None:
        hanging.release()
        released.wait()

    on_read(hang)
    with Prefetcher(requests, num_threads=2, memory_bytes=1 << 20):
        assert all(hanging.acquire(timeout=20) for _ in range(2))
        started = time.monotonic()
    assert time.monotonic() - started < 10
    assert len(living()) == 2
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("weights-"):
            thread.join(20)


def test_memory_of_used_tensors_is_read_into_again(requests: list[ReadRequest]) -> None:
    places = set()
    with Prefetcher(requests[:20], num_threads=1, memory_bytes=3 * SIZE) as threads:
        for _, data in threads:
            places.add(data.ctypes.data)
            del data
    assert len(places) <= 5


class _SignalledError(Exception):
    """Stands for KeyboardInterrupt, which pytest would take for its own."""


def test_a_signal_ends_the_wait_for_a_read(requests: list[ReadRequest], on_read: Spy) -> None:
    released = threading.Event()

    def interrupt(*_: object) -> None:
        released.set()  # by then the waiting thread has been woken
        raise _SignalledError

    on_read(lambda *_: released.wait() and None)
    before = signal.signal(signal.SIGALRM, interrupt)

    def use_all() -> None:
        with Prefetcher(requests, num_threads=2, memory_bytes=1 << 20) as threads:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            list(threads)

    try:
        with pytest.raises(_SignalledError):
            use_all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_not_even_the_page_cache_gets_what_nobody_asked_for(tmp_path: Path) -> None:
    """Every second MiB of a file that is in no cache: the others do not come in with it."""
    mib = 1 << 20
    file = tmp_path / "file"
    file.write_bytes(bytes(16 * mib))
    descriptor, facts = open_regular(file)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if num_resident(file):
        pytest.skip("this file system keeps its files in memory")
    rows = [
        ReadRequest(name=str(at), file=facts, base=at * mib, num_bytes=mib, pieces=(piece,))
        for at in range(0, 16, 2)
        for piece in (Piece(target=0, offset=0, count=1, stride=mib, run=mib),)
    ]
    with Prefetcher(rows, num_threads=2, memory_bytes=4 * mib) as threads:
        assert len(list(threads)) == 8
    assert num_resident(file) == 8 * mib


def num_resident(file: Path) -> int:
    """Bytes of a file that are in the page cache."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None)
        failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), pages)
        del start
        assert not failed
        return mmap.PAGESIZE * sum(page & 1 for page in pages)
