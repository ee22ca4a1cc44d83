"""The exchange by all-gather, and which tokens are a rank's own."""

import pytest
import torch

from services.worker.model.exchange import most_own, own_tokens
from services.worker.model.metadata import ExpertTraffic
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import RowShare, Stream
from services.worker.parallel.groups import OneRank
from services.worker.parallel.moe_method import MoeMethod
from tests.services.worker.model.exchanges import check_layer, run_layer


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("tp2,ep", [5]),
        ("dp2,ep", [5, 5]),
        ("dp2,ep", [7, 1]),
        ("dp3,ep", [1, 4, 2]),
        ("dp2,tp2,ep", [3, 6]),
    ],
)
def test_sums_come_back_whatever_the_replicas_have(
    spec: ModelSpec, layout: str, counts: list[int]
) -> None:
    check_layer(run_layer(spec, layout, MoeMethod.ALLGATHER, counts))


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("tp2,ep", [6]),
        ("tp2,ep", [5]),
        # Three of four ranks have padding alone.
        ("tp4,ep", [1]),
        ("dp2,tp2,ep", [3, 6]),
        ("dp2,tp2,ep", [1, 8]),
    ],
)
def test_shares_of_a_cut_stream_get_their_own_sums(
    spec: ModelSpec, layout: str, counts: list[int]
) -> None:
    check_layer(run_layer(spec, layout, MoeMethod.ALLGATHER, counts, is_flashcomm=True))


def test_padding_costs_no_expert_a_row(spec: ModelSpec) -> None:
    """Padding chose an expert that nobody has: no rank computes it."""
    seen = []
    original = torch.ops.npu.npu_grouped_matmul

    def count(rows: list[torch.Tensor], weight: object, **named: torch.Tensor) -> object:
        seen.append(int(named["group_list"].sum()))
        return original(rows, weight, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.npu, "npu_grouped_matmul", count)
        run_layer(spec, "dp2,ep", MoeMethod.ALLGATHER, [9, 1])
    # Two products of ten tokens with two choices on two ranks, and of each replica's own alone.
    assert sum(seen) == 2 * 10 * 2 + 2 * 10 * 2


def test_ranks_of_a_whole_stream_take_a_share_of_it_and_those_of_a_cut_one_have_theirs() -> None:
    x = torch.arange(5)[:, None]
    share = RowShare(num_rows=5, size=3, rank=2)
    mine, place = own_tokens(x, Stream(share=share, group=OneRank("tp")))
    assert mine.tolist() == [[4], [0]]
    assert place == slice(4, 5)
    cut = Stream(share=share, group=OneRank("tp"), is_cut=True)
    mine, place = own_tokens(x[:2], cut)
    assert mine.tolist() == [[0], [1]]
    assert place == slice(0, 1)
    traffic = ExpertTraffic(method=MoeMethod.MC2, num_tokens=7)
    assert most_own(cut, traffic) == 3
