"""Packed weights: what went in comes out, and nothing takes them for plain ones by accident."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.ops import nz

SHAPES = [(1, 1), (4, 32), (5, 7), (64, 40), (3, 9, 33)]


def random_weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    limits = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(5)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bfloat16, torch.float32])
def test_what_was_packed_is_unpacked(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = random_weight(shape, dtype)
    packed = nz.pack(weight)
    assert nz.is_nz(packed)
    assert not nz.is_nz(weight)
    assert (packed.shape, packed.dtype) == (weight.shape, weight.dtype)
    assert torch.equal(nz.unpack(packed), weight)


def test_four_rows_of_a_column_are_neighbours_and_strips_follow_each_other() -> None:
    weight = torch.arange(8 * 33).view(8, 33).to(torch.int8)
    memory = torch.empty(0, dtype=torch.uint8).set_(nz.pack(weight).untyped_storage())
    packed = (nz.payload(memory, 33) ^ 128).view(torch.int8)
    assert packed[:8].tolist() == [0, 33, 66, 99, 1, 34, 67, 100]
    assert torch.equal(packed[128:132], weight[4:, 0])
    assert torch.equal(packed[256:], weight[:, 32])


def test_as_many_rows_are_neighbours_as_fill_a_word() -> None:
    weight = torch.arange(3 * 33).view(3, 33)
    for dtype, rows in ((torch.bfloat16, 2), (torch.float32, 1)):
        memory = torch.empty(0, dtype=torch.uint8)
        memory.set_(nz.pack(weight.to(dtype)).untyped_storage())
        packed = nz.payload(memory, 33 * dtype.itemsize).view(dtype)
        assert packed[: 2 * rows].tolist() == [0, 33, 1, 34][:: 3 - rows]
        assert packed[32 * rows] == 33 * rows
        # A row that the matrix lacks to fill the last word is zero.
        last = packed[32 * (4 if rows == 2 else 3) :]
        assert last[: 2 * rows].tolist() == ([32, 65, 98, 0] if rows == 2 else [32, 65])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_may_read_a_whole_strip_behind_a_narrow_last_one(dtype: torch.dtype) -> None:
    weight = random_weight((2, 6, 33), dtype)
    packed = nz.pack(weight)
    matrices = nz.packed_bytes(dtype, 2, 6, 33 * dtype.itemsize)
    first = packed.untyped_storage().nbytes() - 32 * 4 - matrices
    memory = torch.empty(0, dtype=torch.uint8).set_(packed.untyped_storage())
    assert nz.payload(memory, 33 * dtype.itemsize).numel() == len(memory) - first


def test_int8_rows_of_two_columns_may_be_viewed_as_eight_columns() -> None:
    pairs = random_weight((2, 12, 64), torch.int8)
    packed = nz.pack(pairs).view(torch.int32)
    assert nz.is_nz(packed)
    assert torch.equal(nz.unpack(packed), pairs.view(torch.int32))


@pytest.mark.parametrize("is_packed", [False, True])
def test_plain_values_of_int4_keep_their_sign_and_order(is_packed: bool) -> None:
    values = torch.tensor([[-8, 7, -1, 0, 1, 2, 3, -4]], dtype=torch.int8)
    weight = ((values[:, ::2] & 15) | (values[:, 1::2] << 4)).view(torch.int32)
    assert torch.equal(nz.plain(nz.pack(weight) if is_packed else weight), values)


def test_a_packed_weight_is_not_flat_and_shows_no_weights() -> None:
    packed = nz.pack(random_weight((16, 8), torch.int8))
    assert not packed.is_contiguous()
    assert len(packed.unique()) == 1
    assert len(packed.clone().unique()) == 1


@pytest.mark.parametrize(
    "cut",
    [
        lambda w: w[0],
        lambda w: w[:1],
        lambda w: w[:, :8],
        lambda w: w[..., :8],
        lambda w: w[..., 8:],
        lambda w: w.view(torch.int32)[..., 1:],
        lambda w: w.as_strided((1, 3, 16), (0, 0, 1)),
    ],
)
def test_a_part_is_no_packed_weight(cut: Any) -> None:
    packed = nz.pack(random_weight((3, 16, 16), torch.int8))
    part = cut(packed)
    assert not part.is_contiguous()
    with pytest.raises(ValueError, match="is a part of another one"):
        nz.unpack(part)


def test_one_row_for_all_is_no_packed_weight() -> None:
    assert not nz.is_nz(torch.zeros(1, 8, dtype=torch.int8).expand(4, 8))


def test_other_types_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a float, int8, or int32"):
        nz.pack(torch.zeros(4, 4, dtype=torch.int16))
    for shape in [(4,), (0, 4)]:
        with pytest.raises(ValueError, match=r"must be \[\.\.\., K, N\]"):
            nz.pack(torch.zeros(shape, dtype=torch.int8))


def test_a_plain_weight_cannot_be_written_into_a_packed_one() -> None:
    weight = random_weight((16, 8), torch.int8)
    packed = nz.pack(weight)
    for target in (packed, packed[:4]):
        with pytest.raises(RuntimeError, match="single memory location"):
            target.copy_(weight[: len(target)])
    assert torch.equal(nz.unpack(packed), weight)


@pytest.mark.filterwarnings("ignore:TypedStorage")  # how torch_npu copies
def test_a_deep_copy_is_whole() -> None:
    weight = random_weight((16, 8), torch.int8)
    assert torch.equal(nz.unpack(copy.deepcopy(nz.pack(weight))), weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_memory_the_mark_and_the_opaque_form_are_the_same(shape: tuple[int, ...]) -> None:
    packed = nz.pack(random_weight(shape, torch.int8))
    shaped = nz.shaped(torch.empty(shape, dtype=torch.int8, device="meta"))
    assert nz.is_nz(shaped)
    assert (shaped.shape, shaped.stride()) == (packed.shape, packed.stride())
    assert shaped.untyped_storage().nbytes() == packed.untyped_storage().nbytes()
    assert not nz.is_nz(torch.empty(shape, dtype=torch.int8, device="meta"))


def test_a_device_tells_its_own_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocked tensor of an NPU has ordinary strides; only its library knows."""
    weight = SimpleNamespace(device=torch.device("privateuseone"))
    for layout in (nz.ND, nz.FRACTAL_NZ):
        call = {"get_npu_format": lambda tensor, layout=layout: layout}
        monkeypatch.setattr(torch.ops, "npu", SimpleNamespace(**call))
        assert nz.is_nz(weight) is (layout == nz.FRACTAL_NZ)  # type: ignore[arg-type]
