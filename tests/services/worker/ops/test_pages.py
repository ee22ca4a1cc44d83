"""Large pages are asked for where they help, and never demanded."""

import errno
import mmap
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from services.worker.ops import pages
from services.worker.ops.pages import populate, prefer_huge_pages

MIB = 1 << 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What the system is asked."""
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *call: calls.append(call) or -1)
    return calls


def test_whole_pages_of_large_memory_are_asked_for(asked: list[tuple[int, int, int]]) -> None:
    memory = torch.empty(8 * MIB + 100, dtype=torch.uint8)
    prefer_huge_pages(memory)  # refused by this system, which does no harm
    ((first, size, advice),) = asked
    assert first % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert memory.data_ptr() <= first < memory.data_ptr() + mmap.PAGESIZE
    end = memory.data_ptr() + memory.nbytes
    assert end - mmap.PAGESIZE < first + size <= end
    assert advice == mmap.MADV_HUGEPAGE


def test_small_memory_and_that_of_a_device_is_left_alone(
    asked: list[tuple[int, int, int]],
) -> None:
    prefer_huge_pages(torch.empty(MIB, dtype=torch.uint8))
    prefer_huge_pages(torch.empty(8 * MIB, dtype=torch.uint8, device="meta"))
    assert asked == []


def test_another_system_is_asked_nothing(
    asked: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = torch.empty(8 * MIB, dtype=torch.uint8)
    prefer_huge_pages(memory)
    assert populate(memory, 0, memory.nbytes) == errno.EINVAL
    assert asked == []


def test_each_page_that_holds_a_wanted_byte_is_asked_for(asked: list[tuple[int, int, int]]) -> None:
    memory = torch.empty(8 * MIB, dtype=torch.uint8)
    populate(memory, 5000, MIB + 1)
    ((first, size, _),) = asked
    assert first % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    wanted = memory.data_ptr() + 5000, memory.data_ptr() + MIB + 1
    assert wanted[0] - mmap.PAGESIZE < first <= wanted[0]
    assert wanted[1] <= first + size < wanted[1] + mmap.PAGESIZE


def test_memory_that_is_taken_keeps_what_it_holds() -> None:
    memory = torch.arange(8 * MIB, dtype=torch.int64)
    assert populate(memory, 0, memory.nbytes) in {0, errno.EINVAL}
    assert bool((memory == torch.arange(8 * MIB)).all())


def test_an_error_of_the_system_is_told() -> None:
    nowhere = SimpleNamespace(data_ptr=lambda: 1 << 60)
    assert populate(cast(torch.Tensor, nowhere), 0, MIB) in {errno.ENOMEM, errno.EINVAL}


def test_this_system_takes_the_advice() -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("no large pages here")
    memory = torch.empty(8 * MIB, dtype=torch.uint8)
    prefer_huge_pages(memory)
    memory.fill_(1)
    assert int(memory.sum(dtype=torch.int64)) == 8 * MIB
