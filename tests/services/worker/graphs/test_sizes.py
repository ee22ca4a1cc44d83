import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.graphs.sizes import CaptureSizes, choose_sizes
from services.worker.plan import Capacity
from shared.errors import ConfigError
from tests.services.worker.plans import make_capacity


def limits(num_seqs: int, *, drafts: int = 0, tokens: int = 8192) -> Capacity:
    return make_capacity(
        max_num_seqs=num_seqs, num_speculative_tokens=drafts, max_num_batched_tokens=tokens
    )


def test_the_default_list_is_vllms() -> None:
    expected = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    assert choose_sizes(limits(1024)).sizes == expected
    assert choose_sizes(limits(256)).sizes == expected[: expected.index(256) + 1]


def test_the_published_deployment_has_the_published_sizes() -> None:
    """12 sequences, 3 drafts, 8 ranks that share tokens."""
    assert choose_sizes(limits(12, drafts=3), multiple=8).sizes == (8, 16, 24, 32, 40, 48)


def test_a_full_step_is_captured_too() -> None:
    assert choose_sizes(limits(13)).sizes == (1, 2, 4, 8, 13)
    assert choose_sizes(limits(300)).sizes[-1] == 300


def test_sizes_are_whole_sequences() -> None:
    assert choose_sizes(limits(5, drafts=2)).sizes == (3, 6, 9, 15)
    assert choose_sizes(limits(64, drafts=7), asked=[8, 15, 16, 24, 30]).sizes == (8, 16, 24, 32)


def test_no_size_is_more_than_a_step_holds() -> None:
    assert choose_sizes(limits(100, tokens=20)).sizes == (1, 2, 4, 8, 16, 20)
    assert choose_sizes(limits(4), asked=[1, 3, 7]).sizes == (1, 3)
    assert choose_sizes(limits(1000), largest=24).sizes == (1, 2, 4, 8, 16, 24)
    assert choose_sizes(limits(1000), largest=1000).sizes[-1] == 1000
    assert choose_sizes(limits(1000), asked=[900]).sizes == (900,)


def test_ranks_that_share_tokens_need_multiples() -> None:
    # 8 and 16 round up to 12 and 18, which 8 ranks cannot share.
    assert choose_sizes(limits(8, drafts=5), multiple=8).sizes == (24, 48)
    # Nobody asked for sizes, and not even two sequences are in a step.
    assert choose_sizes(limits(1), multiple=2) is None
    assert choose_sizes(limits(1, drafts=2), multiple=2) is None
    assert choose_sizes(limits(3, drafts=2), multiple=2).sizes == (6,)
    with pytest.raises(ConfigError, match="of the default none is left"):
        choose_sizes(limits(4), largest=1, multiple=2)
    assert choose_sizes(limits(16), multiple=4).sizes == (4, 8, 16)
    with pytest.raises(ConfigError, match=r"of 3, 5 none is left.*a multiple of 2"):
        choose_sizes(limits(16), asked=[3, 5], multiple=2)
    with pytest.raises(ConfigError, match=r"of 99 none is left: a size is at most 16"):
        choose_sizes(limits(16), asked=[99])


SIZES = CaptureSizes(rows_per_seq=3, sizes=(3, 12, 24))


@pytest.mark.parametrize(
    ("scheduled", "num_seqs"),
    [
        ([3], 1),
        ([1], 1),  # two dead rows
        ([3, 3], 4),
        ([3, 1, 2, 3], 4),
        ([3] * 5, 8),
        ([3] * 9, None),
        ([4], None),
        ([1, 1, 40], None),
    ],
)
def test_a_step_takes_the_next_size(scheduled: list[int], num_seqs: int | None) -> None:
    assert SIZES.fitting(np.array(scheduled)) == num_seqs


@given(
    num_seqs=st.integers(1, 600),
    drafts=st.integers(0, 15),
    multiple=st.sampled_from([1, 2, 8]),
    tokens=st.integers(64, 8192),
)
def test_sizes_ascend_within_all_bounds(
    num_seqs: int, drafts: int, multiple: int, tokens: int
) -> None:
    rows = 1 + drafts
    try:
        chosen = choose_sizes(limits(num_seqs, drafts=drafts, tokens=tokens), multiple=multiple)
    except ConfigError:
        return
    if chosen is None:
        assert min(num_seqs * rows, tokens) < math.lcm(rows, multiple)
        return
    assert list(chosen.sizes) == sorted(set(chosen.sizes))
    for size in chosen.sizes:
        assert rows <= size <= min(num_seqs * rows, tokens)
        assert size % rows == size % multiple == 0
