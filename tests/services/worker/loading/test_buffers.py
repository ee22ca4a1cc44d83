import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.loading.buffers import BufferPool, fresh

MIB = 1 << 20


def address(buffer: np.ndarray) -> int:
    return int(buffer.ctypes.data)


def test_a_buffer_is_used_again_once_nothing_refers_to_it() -> None:
    pool = BufferPool(1000)
    buffer = pool.take(100)
    place = address(buffer)
    del buffer
    assert address(pool.take(90)) == place


def test_what_is_kept_in_any_way_is_never_handed_out_again() -> None:
    pool = BufferPool(10_000)
    buffer = pool.take(128)
    kept = [
        torch.from_numpy(buffer).view(torch.float32)[3:5],
        buffer[8:16],
        buffer[8:16].reshape(2, 4)[1:],
        memoryview(buffer),
    ]
    place = address(buffer)
    del buffer
    while kept:
        others = [pool.take(128) for _ in range(3)]
        assert place not in map(address, others)
        del others
        kept.pop()
    assert place in map(address, [pool.take(128) for _ in range(6)])


def test_a_large_buffer_is_not_spent_on_a_small_need() -> None:
    pool = BufferPool(1000)
    del_me = pool.take(100)
    place = address(del_me)
    del del_me
    small = pool.take(49)
    assert address(small) != place
    assert address(pool.take(50)) == place


def test_the_tightest_buffer_is_taken() -> None:
    pool = BufferPool(1000)
    buffers = {size: pool.take(size) for size in (190, 110, 150)}
    places = {size: address(buffer) for size, buffer in buffers.items()}
    buffers.clear()
    assert address(pool.take(105)) == places[110]


def test_free_and_used_buffers_stay_within_the_bound_together() -> None:
    pool = BufferPool(1000)
    buffers = [pool.take(300) for _ in range(3)]
    buffers.clear()
    big = pool.take(700)
    assert pool.num_free_bytes <= 1000 - big.nbytes


def test_more_than_the_bound_is_handed_out_but_not_kept() -> None:
    pool = BufferPool(1000)
    big = pool.take(5000)
    assert big.nbytes == 5000
    del big
    pool.take(10)
    assert pool.num_free_bytes <= 1000


def test_clearing_drops_what_is_free() -> None:
    pool = BufferPool(1000)
    pool.take(100)
    pool.clear()
    assert pool.num_free_bytes == 0


def held_bytes() -> int:
    """Memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_what_a_thread_took_is_the_systems_again_when_the_pool_is_cleared() -> None:
    """From malloc it would be kept for the thread's arena."""
    pool = BufferPool(1 << 30)
    held: list[int] = []

    def read() -> None:
        # The first large one that is freed makes malloc keep those of its size.
        for _ in range(2):
            buffers = [pool.take(4 * MIB) for _ in range(15)]
            for buffer in buffers:
                buffer.fill(1)
            held.append(held_bytes())
            buffers.clear()
            del buffer
            pool.clear()

    before = held_bytes()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert min(held) - before > 55 * MIB
    assert held_bytes() - before < 8 * MIB


def test_memory_that_is_not_there_is_told_with_its_size() -> None:
    with pytest.raises(MemoryError, match=str(1 << 60)):
        fresh(1 << 60)


@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 16) - 1, 1 << 16, (4 << 20) + 1])
def test_fresh_memory_has_its_size_and_can_be_written(num_bytes: int) -> None:
    buffer = fresh(num_bytes)
    buffer.fill(7)
    assert buffer.nbytes == num_bytes
    assert buffer.flags.writeable
