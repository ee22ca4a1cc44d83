"""What all expert products in int8 share."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz
from services.worker.ops.expert_sums import (
    Experts,
    check_rows,
    check_unset,
    counts_of,
    exact_sums,
    groups_of,
    num_columns,
    open_experts,
)

PAIRS = torch.randint(
    -128, 128, (3, 20, 24), dtype=torch.int8, generator=torch.Generator().manual_seed(5)
)
BITS = torch.ones((3, 48), dtype=torch.int64)
BIAS = torch.zeros(3, 48)


def open_int4(weight: torch.Tensor, native: Any, **changes: Any) -> Experts:
    arguments = {"scale": BITS, "bias": BIAS, "int4_scale_dims": 2, "native": native} | changes
    return open_experts("op", weight, **arguments)


def test_columns_of_packed_int4_count_eight_times() -> None:
    assert num_columns(torch.zeros((2, 4, 6), dtype=torch.int32)) == 48
    assert num_columns(torch.zeros((2, 4, 6), dtype=torch.int8)) == 6


def test_ends_and_counts_mean_the_same_groups() -> None:
    counts = torch.tensor([2, 0, 3])
    assert torch.equal(counts_of(counts.cumsum(0), 0), counts)
    assert torch.equal(counts_of(counts, 1), counts)
    assert groups_of("op", counts, 6).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("counts", [[4, 3], [-1, 2]])
def test_groups_that_do_not_fit_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"op: groups of .* do not fit"):
        groups_of("op", torch.tensor(counts), 6)


def test_without_rows_there_are_no_sums() -> None:
    x = torch.zeros((3, 20), dtype=torch.int8)
    assert exact_sums(x, PAIRS, torch.tensor([0, 0, 0])).shape == (0, 24)


@pytest.mark.parametrize("is_packed", [True, False])
def test_column_sums_add_the_int4_weights_of_each_column(
    compiled: dict[str, Any], is_packed: bool
) -> None:
    low, high = PAIRS << 4 >> 4, PAIRS >> 4
    wanted = torch.stack((low, high), dim=-1).flatten(-2).sum(1, dtype=torch.int32)
    for native in compiled.values():
        weight = (nz.pack(PAIRS) if is_packed else PAIRS).view(torch.int32)
        experts = open_int4(weight, native)
        assert (experts.groups, experts.inner, experts.outer, experts.bits) == (3, 20, 48, 4)
        assert experts.is_packed is is_packed
        assert experts.column_sums is not None
        assert torch.equal(experts.column_sums, wanted)


def test_a_packed_weight_is_looked_at_once_with_what_belongs_to_it(
    compiled: dict[str, Any],
) -> None:
    native = next(iter(compiled.values()))
    packed = nz.pack(PAIRS).view(torch.int32)
    first = open_int4(packed, native)
    assert open_int4(packed, native) is first
    other = BITS.clone()
    second = open_int4(packed, native, scale=other)
    assert second is not first
    assert second.scale is other
    with pytest.raises(ValueError, match="float32 bias"):
        open_int4(packed, native, bias=None)


def test_a_plain_weight_may_change_between_calls(compiled: dict[str, Any]) -> None:
    native = next(iter(compiled.values()))
    plain = PAIRS.clone().view(torch.int32)
    before = open_int4(plain, native).column_sums
    plain.zero_()
    after = open_int4(plain, native).column_sums
    assert before is not None
    assert after is not None
    assert before.count_nonzero() > 0
    assert after.count_nonzero() == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros((4, 19), dtype=torch.int8)}, r"flat \[M, 20\] int8"),
        ({"x": torch.zeros(4, 20)}, "int8"),
        ({"x": torch.zeros((20, 4), dtype=torch.int8).t()}, "flat"),
        ({"row_scale": torch.ones(4, 1)}, "row scales"),
        ({"row_scale": torch.ones(8)[::2]}, "row scales"),
        ({"group_list": None}, "group_list"),
        ({"group_list": torch.ones(2, dtype=torch.int64)}, "per group"),
        ({"group_list": torch.ones(3, dtype=torch.int32)}, "int64"),
    ],
)
def test_rows_that_do_not_go_with_the_experts_are_refused(
    changes: dict[str, Any], reason: str
) -> None:
    experts = open_experts("op", PAIRS, None, None, int4_scale_dims=2)
    right = {
        "x": torch.zeros((4, 20), dtype=torch.int8),
        "row_scale": torch.ones(4),
        "group_list": torch.ones(3, dtype=torch.int64),
    }
    check_rows("op", experts, **right)
    with pytest.raises(ValueError, match=reason):
        check_rows("op", experts, **(right | changes))


@pytest.mark.parametrize("value", [1, [2], torch.zeros(2), torch.zeros(0)])
def test_an_argument_that_is_not_computed_with_is_refused_by_name(value: object) -> None:
    check_unset("op", {"other": None, "mode": 0, "more": []})
    with pytest.raises(ValueError, match="op: other is not supported"):
        check_unset("op", {"other": value})
