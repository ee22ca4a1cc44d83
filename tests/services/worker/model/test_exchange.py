"""The exchange by all-gather, and how tokens are cut and padded."""

from dataclasses import replace

import pytest
import torch

from services.worker.model.exchange import TokenSlice, padded_rows
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
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


def test_rows_are_padded_to_a_count() -> None:
    x = torch.ones(2, 3, dtype=torch.int32)
    assert padded_rows(x, 2) is x
    padded = padded_rows(x, 4, 9)
    assert padded.tolist() == [[1] * 3, [1] * 3, [9] * 3, [9] * 3]
    assert padded.dtype == torch.int32


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
def test_slices_cover_the_tokens_once(spec: ModelSpec, size: int, num_tokens: int) -> None:
    found: list[int] = []
    for rank in range(size):
        placed = replace(spec, placement=Placement(tp_size=size, tp_rank=rank))
        cut = TokenSlice(placed)
        own = cut.of(num_tokens)
        assert own.stop - own.start <= cut.largest(num_tokens)
        found += range(num_tokens)[own]
    assert found == list(range(num_tokens))
