"""Each operator against torch's own, to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.graphs.lowering import lowered
from services.worker.graphs.recording import CaptureError
from services.worker.ops.native import Native

ATEN = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture
def call(library: Native) -> Callable[..., Any]:
    kernels = lowered(library)

    def call(operator: Any, *arguments: object, **options: object) -> Any:
        return kernels[operator](*arguments, **options)

    return call


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)


def numbers(generator: torch.Generator) -> Tensor:
    """Floats of all sizes: normal and denormal in each type, ties, infinities, zeros."""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    ties = torch.arange(-70_000, 70_000, dtype=torch.float32) / 64
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 65504, 65519.9, 65520, 6e-8])
    found = torch.cat((values[values.isfinite()], ties, ties * 2.0**-20, special))
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
    ],
)
def test_conversions_round_as_torch_does(
    call: Callable[..., Any], generator: torch.Generator, source: torch.dtype, target: torch.dtype
) -> None:
    values = numbers(generator).to(source)
    result = call(ATEN._to_copy.default, values, dtype=target)
    expected = values.to(target)
    assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


def test_slots_are_widened(call: Callable[..., Any]) -> None:
    slots = torch.tensor([5, -1, 2**31 - 1], dtype=torch.int32)
    assert same(call(ATEN._to_copy.default, slots, dtype=torch.int64), slots.long())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int8])
def test_rows_are_taken(call: Callable[..., Any], dtype: torch.dtype) -> None:
    table = torch.arange(24).view(6, 4).to(dtype)
    index = torch.tensor([5, 0, 0, 3])
    assert same(call(ATEN.embedding.default, table, index), table[index])
    assert same(call(ATEN.index_select.default, table, 0, index), table[index])


def test_a_row_outside_the_table_is_refused(call: Callable[..., Any]) -> None:
    for index in (6, -1):
        with pytest.raises(ValueError, match="outside its tensor"):
            call(ATEN.embedding.default, torch.zeros(6, 4), torch.tensor([index]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_copies_of_parts_leave_the_rest(call: Callable[..., Any], dtype: torch.dtype) -> None:
    source = torch.arange(2 * 3 * 4).view(2, 3, 4).to(dtype)
    for part in ((...,), (..., slice(1, 3)), (slice(1), slice(1, 3), slice(2))):
        whole = torch.full((2, 3, 4), 99).to(dtype)
        expected = whole.clone()
        expected[part] = source[part]
        target = whole[part]
        assert call(ATEN.copy_.default, target, source[part]) is target
        assert same(whole, expected)


@pytest.mark.parametrize("shape", [(5, 7), (5, 1, 7), (1, 7), (5, 7, 1), (0, 7)])
def test_slices_become_flat(call: Callable[..., Any], shape: tuple[int, ...]) -> None:
    wide = torch.arange(400).view(20, 20)[: shape[0], : shape[-1]]
    source = wide.view(shape[0], *[1] * (len(shape) - 2), wide.shape[1])
    result = call(ATEN.clone.default, source, memory_format=torch.contiguous_format)
    assert same(result, source)
    assert result.is_contiguous()


def test_scattered_numbers_are_refused(call: Callable[..., Any]) -> None:
    for source in (torch.zeros(4, 6).t(), torch.zeros(3, 4, 8)[:, :2]):
        with pytest.raises(CaptureError, match="a recorded step takes rows"):
            call(ATEN.clone.default, source)


def test_parts_are_joined_along_the_last_dimension(call: Callable[..., Any]) -> None:
    parts = [torch.arange(6).view(2, 3), torch.arange(20).view(2, 10)[:, :4]]
    assert same(call(ATEN.cat.default, parts, 1), torch.cat(parts, 1))
    deep = [part.view(2, 1, -1) for part in parts]
    assert same(call(ATEN.cat.default, deep, -1), torch.cat(deep, -1))
    with pytest.raises(CaptureError, match="along the last"):
        call(ATEN.cat.default, parts, 0)


def test_states_of_a_stage_travel_as_one(call: Callable[..., Any]) -> None:
    parts = [torch.arange(12).view(3, 4), torch.arange(12).view(3, 4) + 50]
    assert same(call(ATEN.stack.default, parts), torch.stack(parts))
    with pytest.raises(CaptureError, match="new first dimension"):
        call(ATEN.stack.default, parts, 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_round_once(
    call: Callable[..., Any], generator: torch.Generator, dtype: torch.dtype
) -> None:
    one, other = (torch.randn(50, 33, generator=generator).to(dtype) for _ in range(2))
    expected = one + other
    assert call(ATEN.add_.Tensor, one, other) is one
    assert same(one, expected)


def test_running_sums(call: Callable[..., Any]) -> None:
    counts = torch.tensor([3, 0, 0, 7, 1])
    assert same(call(ATEN.cumsum.default, counts, 0), counts.cumsum(0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_comparisons(call: Callable[..., Any], dtype: torch.dtype) -> None:
    values = torch.tensor([-2, -1, 0, 1, 0], dtype=dtype)
    assert same(call(ATEN.lt.Scalar, values, 0), values < 0)
    assert same(call(ATEN.eq.Scalar, values, 0), values == 0)
    assert same(call(ATEN.ge.Scalar, values, 0), values >= 0)


def test_ids_of_another_part_of_the_vocabulary(call: Callable[..., Any]) -> None:
    ids = torch.tensor([5, 9, 20, 4])
    local = call(ATEN.sub.Tensor, ids, 5)
    assert same(local, ids - 5)
    is_elsewhere = call(ATEN.bitwise_or.Tensor, local < 0, ids >= 9)
    assert same(is_elsewhere, (local < 0) | (ids >= 9))
    assert same(call(ATEN.masked_fill.Scalar, local, is_elsewhere, 0), torch.tensor([0, 0, 0, 0]))
    rows = torch.ones(4, 3)
    assert call(ATEN.masked_fill_.Scalar, rows, is_elsewhere[:, None], 0) is rows
    assert rows[:, 0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask_shape", [(4, 3), (4, 1), ()])
@pytest.mark.parametrize("fill", [False, True])
def test_masks_of_numbers_rows_and_all(
    call: Callable[..., Any], dtype: torch.dtype, mask_shape: tuple[int, ...], fill: bool
) -> None:
    values = torch.full((4, 3), float("nan")).to(dtype)
    values[1:] = torch.arange(9).view(3, 3) + 1
    mask = torch.full(mask_shape, fill)
    if mask.dim():
        mask[0] = True
    result = call(ATEN.masked_fill.Scalar, values, mask, 0)
    expected = values.masked_fill(mask, 0)
    assert torch.equal(result.nan_to_num(77), expected.nan_to_num(77))


def test_lower_bounds_and_conjunctions(call: Callable[..., Any]) -> None:
    values = torch.tensor([-5, 0, 9], dtype=torch.int32)
    assert same(call(ATEN.clamp_min.default, values, 0), values.clamp_min(0))
    for truths in ([True, True], [True, False], [False]):
        tensor = torch.tensor(truths)
        assert same(call(ATEN.all.default, tensor), tensor.all())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_zeros(call: Callable[..., Any], dtype: torch.dtype) -> None:
    like = torch.ones(3, 5, dtype=dtype)
    assert same(call(ATEN.zeros_like.default, like), torch.zeros_like(like))
    assert same(call(ATEN.new_zeros.default, like, [7]), like.new_zeros(7))


def test_other_forms_are_refused(call: Callable[..., Any]) -> None:
    ones = torch.ones(2, 3)
    for operator, arguments in (
        (ATEN.index_select.default, (ones, 1, torch.tensor([0]))),
        (ATEN._to_copy.default, (ones.double(),)),
        (ATEN.add_.Tensor, (ones, ones[:1])),
        (ATEN.cumsum.default, (ones, 0)),
        (ATEN.masked_fill.Scalar, (ones, ones > 0, 1)),
        (ATEN.eq.Scalar, (ones, 0)),
    ):
        with pytest.raises(CaptureError, match="a recorded step takes"):
            call(operator, *arguments)
