import gc

import pytest
import torch

from services.worker.graphs.arena import Arena
from services.worker.graphs.recording import CaptureError


def test_places_of_dropped_tensors_are_lent_again(arena: Arena) -> None:
    arena.restart()
    first = arena.empty((10, 3), torch.float32)
    second = arena.empty((5,), torch.int64)
    address = first.data_ptr()
    assert second.data_ptr() >= address + first.nbytes
    del first
    assert arena.empty((10, 3), torch.float32).data_ptr() == address


def test_a_view_keeps_the_place(arena: Arena) -> None:
    arena.restart()
    whole = arena.empty((4, 8), torch.bfloat16)
    address = whole.data_ptr()
    view = whole.view(torch.int16)[1:, 2:].flatten(0).view(-1)[3:]
    kept = whole[2:].t().unsqueeze(0)
    del whole, view
    assert arena.empty((4, 8), torch.bfloat16).data_ptr() != address
    del kept
    assert arena.empty((4, 8), torch.bfloat16).data_ptr() == address


def test_free_neighbours_become_one_place(arena: Arena) -> None:
    arena.restart()
    tensors = [arena.empty((100,), torch.uint8) for _ in range(4)]
    start = tensors[0].data_ptr()
    last = tensors[3]
    for place in (1, 0, 2):
        tensors[place] = last
    tensors.clear()
    assert arena.empty((3 * 128,), torch.uint8).data_ptr() == start


def test_addresses_come_in_the_same_order_after_each_restart(arena: Arena) -> None:
    sizes = [7, 4096, 65, 1 << 20]
    taken = []
    for _ in range(3):
        arena.restart()
        kept = [arena.empty((size,), torch.int8) for size in sizes]
        taken.append([tensor.data_ptr() for tensor in kept])
    assert taken[0] == taken[1] == taken[2]
    assert all(address % 64 == 0 for address in taken[0])


def test_a_tensor_of_before_a_restart_gives_nothing_back(arena: Arena) -> None:
    arena.restart()
    old = arena.empty((64,), torch.int8)
    arena.restart()
    new = arena.empty((64,), torch.int8)
    assert new.data_ptr() == old.data_ptr()
    del old
    gc.collect()
    assert not arena.is_free(new.data_ptr())


def test_more_than_a_chunk_is_lent_and_counted(arena: Arena) -> None:
    arena.restart()
    large = arena.empty((80 << 20,), torch.int8)
    small = arena.empty((1 << 20,), torch.int8)
    assert arena.most_in_use_bytes == 81 << 20
    assert arena.has(large.data_ptr())
    assert arena.has(small.data_ptr())
    assert not arena.has(torch.empty(1).data_ptr())


def test_what_is_not_lent_is_free(arena: Arena) -> None:
    arena.restart()
    tensor = arena.empty((64,), torch.int8)
    address = tensor.data_ptr()
    assert not arena.is_free(address)
    assert not arena.is_free(address + 63)
    assert arena.is_free(address + 64)
    del tensor
    assert arena.is_free(address)


def test_an_empty_tensor_takes_no_place(arena: Arena) -> None:
    arena.restart()
    assert arena.empty((0, 5), torch.float32).shape == (0, 5)
    assert arena.most_in_use_bytes == 0


def test_a_smaller_step_gets_the_places_of_the_larger(arena: Arena) -> None:
    arena.restart()
    first = arena.empty((100,), torch.float32)
    second = arena.empty((100,), torch.float32)
    addresses = [first.data_ptr(), second.data_ptr()]
    plan = arena.loans
    arena.restart(plan)
    small = [arena.empty((count,), torch.float32) for count in (3, 100)]
    assert [tensor.data_ptr() for tensor in small] == addresses
    with pytest.raises(CaptureError, match="no place in the plan"):
        arena.empty((1,), torch.float32)
    arena.restart(plan)
    with pytest.raises(CaptureError, match="896 bytes have no place in the plan, which has 448"):
        arena.empty((112,), torch.float64)
