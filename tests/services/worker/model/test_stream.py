"""The stream between blocks, whole and cut, on ranks that are threads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.model.config import ModelConfig
from services.worker.model.placement import Placement
from services.worker.model.stream import RowShare, Stream, cuts_stream, padded_rows
from tests.services.worker.parallel.thread_groups import make_groups, run_together


@given(num_rows=st.integers(1, 40), size=st.integers(1, 9))
def test_shares_are_even_and_cover_the_rows_once(num_rows: int, size: int) -> None:
    shares = [RowShare(num_rows=num_rows, size=size, rank=rank) for rank in range(size)]
    covered = [row for share in shares for row in range(num_rows)[share.rows]]
    assert covered == list(range(num_rows))
    x = torch.arange(1, num_rows + 1)[:, None]
    parts = torch.cat([share.of(x) for share in shares])
    assert len(parts) == shares[0].padded == size * shares[0].part
    assert parts.shape[0] - num_rows < size
    assert torch.equal(parts[:num_rows], x)
    assert not parts[num_rows:].any()
    assert [share.count for share in shares] == [len(x[share.rows]) for share in shares]


def run(size: int, num_rows: int, *, is_cut: bool, work: Any) -> list[Any]:
    groups = make_groups("tp", size)

    def on(rank: int) -> Any:
        share = RowShare(num_rows=num_rows, size=size, rank=rank)
        return work(Stream(share=share, group=groups[rank], is_cut=is_cut), rank)

    return run_together(on, size)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(("size", "num_rows"), [(2, 6), (2, 5), (4, 5), (4, 1), (3, 4)])
def test_what_is_added_up_and_brought_together_is_the_whole_sum(
    is_cut: bool, size: int, num_rows: int
) -> None:
    parts = torch.randint(-99, 99, (size, num_rows, 3)).float()

    def work(stream: Stream, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        summed = stream.add_up(parts[rank].clone())
        assert len(summed) == stream.num_rows
        return stream.whole(summed), stream.own(summed)

    for rank, (whole, own) in enumerate(run(size, num_rows, is_cut=is_cut, work=work)):
        assert torch.equal(whole, parts.sum(0))
        share = RowShare(num_rows=num_rows, size=size, rank=rank)
        assert torch.equal(own, share.of(parts.sum(0)))


def test_sums_may_come_with_padding_already() -> None:
    parts = torch.randint(-99, 99, (2, 6, 3)).float()
    for is_cut in (False, True):
        found = run(
            2,
            5,
            is_cut=is_cut,
            work=lambda stream, rank: stream.whole(stream.add_up(parts[rank].clone())),
        )
        for whole in found:
            assert torch.equal(whole, parts.sum(0)[:5])


def test_rows_of_all_tokens_are_put_into_its_form() -> None:
    x = torch.arange(5)[:, None]
    share = RowShare(num_rows=5, size=2, rank=1)
    group: Any = None
    assert Stream(share=share, group=group).cut(x) is x
    assert Stream(share=share, group=group, is_cut=True).cut(x).tolist() == [[3], [4], [0]]


def test_one_rank_has_everything() -> None:
    stream, x = Stream.alone(5), torch.randn(5, 3)
    assert stream.num_rows == 5
    for found in (stream.cut(x), stream.own(x), stream.whole(x), stream.add_up(x)):
        assert torch.equal(found, x)


def test_rows_are_padded_to_a_count() -> None:
    x = torch.ones(2, 3, dtype=torch.int32)
    assert padded_rows(x, 2) is x
    padded = padded_rows(x, 4, 9)
    assert padded.tolist() == [[1] * 3, [1] * 3, [9] * 3, [9] * 3]
    assert padded.dtype == torch.int32
    assert padded_rows(x, 3).tolist() == [[1] * 3, [1] * 3, [0] * 3]


def test_models_with_experts_are_cut_in_every_step_and_others_in_large_ones(
    config: ModelConfig,
) -> None:
    cut = Placement(tp_size=2, is_flashcomm=True)
    dense = replace(config, mlp_layer_types=("dense",) * config.num_hidden_layers)
    assert cuts_stream(config, cut, 1)
    assert not cuts_stream(dense, cut, 1000)
    assert cuts_stream(dense, cut, 1001)
    assert not cuts_stream(config, Placement(tp_size=2), 5000)
