"""Lengths of a share of a step's rows, against counting them row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.ops import native, registry
from services.worker.ops.lengths import cut_lengths, kernels


@pytest.fixture(autouse=True, scope="module")
def operators() -> None:
    registry.register()


def counted(
    counts: list[int], keys: list[int], first: int, count: int
) -> tuple[list[int], list[int]]:
    """Rows of each sequence inside, and the keys that the last of them sees; then the padding."""
    rows = [at for at, size in enumerate(counts) for _ in range(size)]
    inside = rows[first : first + count]
    ends, seen, total = [], [], 0
    for at, size in enumerate(counts):
        total += inside.count(at)
        ends.append(total)
        start = sum(counts[:at])
        last = min(start + size, first + count) - 1
        # The last row of the step sees all keys, each before it one less.
        hidden = start + size - 1 - last
        seen.append(max(0, keys[at] - hidden) if inside.count(at) else 0)
    return [*ends, count], [*seen, 0]


@given(
    sequences=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=6),
    size=st.integers(1, 6),
    rank=st.integers(0, 5),
)
def test_each_row_of_a_share_sees_what_it_sees_in_the_step(
    sequences: list[tuple[int, int]], size: int, rank: int
) -> None:
    counts = [count for count, _ in sequences]
    # A sequence has at least the keys of its rows; padding has rows without keys.
    keys = [count + before if before else 0 for count, before in sequences]
    part = -(-sum(counts) // size)
    first = (rank % size) * part
    cum = torch.tensor(counts).cumsum(0).to(torch.int32)
    lens = torch.tensor(keys, dtype=torch.int32)
    expected = counted(counts, keys, first, part)
    for found in (
        cut_lengths(cum, lens, first, part),
        torch.ops.glm.cut_lengths(cum, lens, first, part),
    ):
        assert [part.dtype for part in found] == [torch.int32] * 2
        assert (found[0].tolist(), found[1].tolist()) == expected


def test_the_sheets_example_of_two_ranks() -> None:
    """Queries of 3 and 2 rows, of 3 and 5 keys: the second of two ranks has rows 3 to 5 of 6."""
    cum = torch.tensor([3, 5], dtype=torch.int32)
    lens = torch.tensor([3, 5], dtype=torch.int32)
    ends, keys = torch.ops.glm.cut_lengths(cum, lens, 3, 3)
    assert ends.tolist() == [0, 2, 3]
    assert keys.tolist() == [0, 5, 0]


@pytest.mark.skipif(native.load() is None, reason="the default is torch's own")
def test_other_lengths_are_refused() -> None:
    lens = torch.tensor([3, 5], dtype=torch.int32)
    for wrong in (lens.long(), lens[:1], lens[None]):
        with pytest.raises(ValueError, match="cut_lengths: "):
            torch.ops.glm.cut_lengths(wrong, lens, 0, 2)


def test_without_compiled_kernels_the_default_stands() -> None:
    assert kernels(None) == {}
    assert native.load() is None or kernels(native.load()).keys() == {"cut_lengths"}
