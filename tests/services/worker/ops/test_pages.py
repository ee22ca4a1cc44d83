"""Large pages are asked for where they help, and never demanded."""

import mmap

import pytest
import torch

from services.worker.ops import pages
from services.worker.ops.pages import prefer_huge_pages

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


def test_a_system_without_large_pages_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_advise", lambda: None)
    prefer_huge_pages(torch.empty(8 * MIB, dtype=torch.uint8))


def test_this_system_takes_the_advice() -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("no large pages here")
    memory = torch.empty(8 * MIB, dtype=torch.uint8)
    prefer_huge_pages(memory)
    memory.fill_(1)
    assert int(memory.sum(dtype=torch.int64)) == 8 * MIB
