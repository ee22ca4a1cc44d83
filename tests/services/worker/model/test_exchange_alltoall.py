"""The exchange by all-to-all."""

import pytest

from services.worker.model.spec import ModelSpec
from services.worker.parallel.moe_method import MoeMethod
from tests.services.worker.model.exchanges import check_layer, run_layer


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("tp2,ep", [5]),
        # Fewer tokens than ranks: one works on padding alone.
        ("tp2,ep", [1]),
        ("dp2,ep", [7, 1]),
        # 8 experts on 3 ranks.
        ("dp3,ep", [1, 4, 2]),
        ("dp2,tp2,ep", [3, 6]),
    ],
)
def test_sums_come_back_whatever_the_replicas_have(
    spec: ModelSpec, layout: str, counts: list[int]
) -> None:
    check_layer(run_layer(spec, layout, MoeMethod.ALLTOALL, counts))


@pytest.mark.parametrize(
    ("layout", "counts"),
    [("tp2,ep", [5]), ("tp4,ep", [1]), ("dp2,tp2,ep", [3, 6]), ("dp2,tp2,ep", [1, 8])],
)
def test_shares_of_a_cut_stream_get_their_own_sums(
    spec: ModelSpec, layout: str, counts: list[int]
) -> None:
    check_layer(run_layer(spec, layout, MoeMethod.ALLTOALL, counts, is_flashcomm=True))


def test_ranks_without_rows_take_part(spec: ModelSpec) -> None:
    """Seven of eight ranks hold one expert each; one token reaches two of them."""
    check_layer(run_layer(spec, "dp8,ep", MoeMethod.ALLTOALL, [1] * 8))
