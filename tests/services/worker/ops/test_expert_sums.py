"""What all expert products in int8 share."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz
from services.worker.ops.expert_sums import (
    check_unset,
    column_sums,
    counts_of,
    exact_sums,
    groups_of,
    num_columns,
)


def random_pairs(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


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
    x, weight = torch.zeros((3, 8), dtype=torch.int8), random_pairs(2, 8, 5)
    assert exact_sums(x, weight, torch.tensor([0, 0])).shape == (0, 5)


@pytest.mark.parametrize("is_packed", [True, False])
def test_column_sums_add_the_int4_weights_of_each_column(
    compiled: dict[str, Any], is_packed: bool
) -> None:
    pairs = random_pairs(3, 20, 24)
    weight = (nz.pack(pairs) if is_packed else pairs).view(torch.int32)
    low, high = pairs << 4 >> 4, pairs >> 4
    wanted = torch.stack((low, high), dim=-1).flatten(-2).sum(1, dtype=torch.int32)
    for native in compiled.values():
        assert torch.equal(column_sums(native, weight), wanted)


def test_column_sums_of_a_packed_weight_are_found_once(compiled: dict[str, Any]) -> None:
    native = next(iter(compiled.values()))
    packed = nz.pack(random_pairs(3, 20, 24)).view(torch.int32)
    assert column_sums(native, packed) is column_sums(native, packed)
    plain = random_pairs(3, 20, 24).view(torch.int32)
    before = column_sums(native, plain)
    plain.zero_()  # a plain weight may change
    assert not torch.equal(column_sums(native, plain), before)


@pytest.mark.parametrize("value", [1, [2], torch.zeros(2), torch.zeros(0)])
def test_an_argument_that_is_not_computed_with_is_refused_by_name(value: object) -> None:
    check_unset("op", {"other": None, "mode": 0, "more": []})
    with pytest.raises(ValueError, match="op: other is not supported"):
        check_unset("op", {"other": value})
