"""The grouped product in int8 against exact integer sums."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz, registry

COUNTS = [3, 0, 1, 61, 9]  # an empty group, one row, more rows than share a strip
ROWS = 80  # 6 more than are in groups


def layout(weight: torch.Tensor, is_packed: bool) -> torch.Tensor:
    return nz.pack(weight) if is_packed else weight


def random_int8(generator: torch.Generator, *shape: int, low: int = -128) -> torch.Tensor:
    high = 128 if low == -128 else 8
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int8)


def random_scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 1e-2 + 1e-4


def pack_pairs(weight: torch.Tensor) -> torch.Tensor:
    """int4 values [..., N] as int32 [..., N / 8], the first column lowest."""
    pairs = (weight[..., ::2] & 15) | (weight[..., 1::2] << 4)
    return pairs.contiguous().view(torch.int32)


def scale_bits(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales as the device reads them: bits in the lower half of an int64."""
    return scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def multiply(kernels: Any, x: torch.Tensor, weight: torch.Tensor, **changes: Any) -> torch.Tensor:
    arguments = {
        "group_list": torch.tensor(COUNTS),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
    } | changes
    result: torch.Tensor = kernels["npu_grouped_matmul"]([x], [weight], **arguments)[0]
    return result


def exact(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """int64 sums of the rows in groups."""
    parts = x[: sum(counts)].split(counts)
    return torch.cat([p.long() @ m.long() for p, m in zip(parts, weight, strict=True)])


def by_row(values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return values.repeat_interleave(torch.tensor(counts), dim=0)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(192, 128), (64, 192), (37, 42), (600, 72)])
def test_sums_are_exact(
    kernels: Any, generator: torch.Generator, is_packed: bool, inner: int, outer: int
) -> None:
    x, weight = random_int8(generator, ROWS, inner), random_int8(generator, 5, inner, outer)
    found = multiply(kernels, x, layout(weight, is_packed), output_dtype=torch.int32)
    assert found.dtype is torch.int32
    assert torch.equal(found[: sum(COUNTS)].long(), exact(x, weight, COUNTS))


def test_sums_of_the_largest_values_stay_exact(kernels: Any) -> None:
    x = torch.full((2, 6144), -128, dtype=torch.int8)
    weight = torch.full((2, 6144, 32), -128, dtype=torch.int8)
    weight[1] = 127
    found = multiply(
        kernels, x, nz.pack(weight), group_list=torch.tensor([1, 1]), output_dtype=torch.int32
    )
    assert found[0].unique().tolist() == [6144 * 128 * 128]
    assert found[1].unique().tolist() == [-6144 * 128 * 127]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("list_type", [0, 1])
def test_values_are_sums_times_both_scales(
    kernels: Any,
    dtype: torch.dtype,
    generator: torch.Generator,
    is_packed: bool,
    scale_type: torch.dtype,
    list_type: int,
) -> None:
    x, weight = random_int8(generator, ROWS, 192), random_int8(generator, 5, 192, 72)
    scale = random_scales(generator, 5, 72).to(scale_type)
    row_scale = random_scales(generator, ROWS)
    counts = torch.tensor(COUNTS)
    found = multiply(
        kernels,
        x,
        layout(weight, is_packed),
        scale=[scale],
        per_token_scale=[row_scale],
        group_list=counts if list_type else counts.cumsum(0),
        group_list_type=list_type,
        output_dtype=dtype,
    )
    assert found.dtype is dtype
    factors = by_row(scale.double(), COUNTS) * row_scale[: sum(COUNTS), None].double()
    # Three roundings to float32 at most, one to bfloat16.
    bound = 2**-22 if dtype is torch.float32 else 2**-8
    wanted = exact(x, weight, COUNTS).double() * factors
    torch.testing.assert_close(found[: sum(COUNTS)].double(), wanted, rtol=bound, atol=0.0)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(192, 128), (64, 192), (46, 40)])
def test_int4_values_are_the_plain_integer_product(
    kernels: Any,
    dtype: torch.dtype,
    generator: torch.Generator,
    is_packed: bool,
    inner: int,
    outer: int,
) -> None:
    """The bias that undoes the device's shift leaves nothing but rounding."""
    x, weight = random_int8(generator, ROWS, inner), random_int8(generator, 5, inner, outer, low=-8)
    scale, row_scale = random_scales(generator, 5, outer), random_scales(generator, ROWS)
    bias = 8.0 * weight.sum(1).float() * scale
    found = multiply(
        kernels,
        x,
        layout(pack_pairs(weight), is_packed),
        scale=[scale_bits(scale)[:, None]],
        bias=[bias],
        per_token_scale=[row_scale],
        output_dtype=dtype,
    )
    rows = row_scale[: sum(COUNTS), None].double()
    wanted = exact(x, weight, COUNTS).double() * by_row(scale.double(), COUNTS) * rows
    # What is left of the bias is below its own last places; then as for int8.
    left = by_row(bias.abs().double(), COUNTS).amax() * rows.amax() * 2**-22
    bound = 2**-22 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(found[: sum(COUNTS)].double(), wanted, rtol=bound, atol=float(left))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_wrong_int4_bias_shows_as_on_the_device(
    kernels: Any, generator: torch.Generator, is_packed: bool
) -> None:
    """``((q - 8) @ W * scale + bias) * row scale``, whatever the bias is."""
    x, weight = random_int8(generator, ROWS, 64), random_int8(generator, 5, 64, 32, low=-8)
    scale, row_scale = random_scales(generator, 5, 32), random_scales(generator, ROWS)
    bias = torch.randn((5, 32), generator=generator)
    found = multiply(
        kernels,
        x,
        layout(pack_pairs(weight), is_packed),
        scale=[scale_bits(scale)[:, None]],
        bias=[bias],
        per_token_scale=[row_scale],
        output_dtype=torch.float32,
    )
    shifted = exact(x.long() - 8, weight, COUNTS).double()
    wanted = shifted * by_row(scale.double(), COUNTS) + by_row(bias.double(), COUNTS)
    wanted = wanted * row_scale[: sum(COUNTS), None].double()
    # Terms up to 64 * 128 * 8 * 0.01 = 655 times a row scale of 0.01, rounded to float32.
    bound = 655e-2 * 2**-21
    torch.testing.assert_close(found[: sum(COUNTS)].double(), wanted, rtol=0.0, atol=bound)


def test_a_row_does_not_depend_on_the_rows_beside_it(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight = random_int8(generator, ROWS, 100), random_int8(generator, 5, 100, 72)
    scale, row_scale = random_scales(generator, 5, 72), random_scales(generator, ROWS)
    packed = nz.pack(weight)
    together = multiply(
        kernels, x, packed, scale=[scale], per_token_scale=[row_scale], output_dtype=dtype
    )
    for row, group in [(0, 0), (3, 2), (4, 3), (40, 3), (64, 3), (65, 4), (73, 4)]:
        counts = torch.zeros(5, dtype=torch.int64)
        counts[group] = 1
        alone = multiply(
            kernels,
            x[row : row + 1],
            packed,
            scale=[scale],
            per_token_scale=[row_scale[row : row + 1]],
            group_list=counts,
            output_dtype=dtype,
        )
        assert torch.equal(alone[0], together[row])


def test_threads_do_not_change_a_result(
    compiled: dict[str, Any], generator: torch.Generator
) -> None:
    native = next(iter(compiled.values()))
    x, weight = random_int8(generator, 300, 256), nz.pack(random_int8(generator, 5, 256, 200))
    scale, row_scale = random_scales(generator, 5, 200), random_scales(generator, 300)
    results = []
    for threads in (1, 3):
        native.set_num_threads(threads)
        results.append(
            multiply(
                registry.cpu_kernels(native),
                x,
                weight,
                scale=[scale],
                per_token_scale=[row_scale],
                group_list=torch.tensor([100, 0, 50, 149, 1]),
                output_dtype=torch.bfloat16,
            )
        )
    native.set_num_threads(1)
    assert torch.equal(*results)


def refused(kernels: Any, **changes: Any) -> None:
    weight = changes.pop("weight", torch.zeros((2, 16, 32), dtype=torch.int8))
    arguments = {
        "scale": [torch.ones(2, 32)],
        "per_token_scale": [torch.ones(3)],
        "group_list": torch.tensor([1, 2]),
        "output_dtype": torch.bfloat16,
    } | changes
    multiply(kernels, torch.zeros((3, 16), dtype=torch.int8), weight, **arguments)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_dtype": torch.float16}, "output_dtype"),
        ({"output_dtype": torch.int32}, "without scales"),
        ({"output_dtype": None}, "output_dtype"),
        ({"scale": None}, "need scale"),
        ({"per_token_scale": None}, "need scale"),
        ({"scale": [torch.ones(2, 31)]}, "scale"),
        ({"scale": [torch.ones(2, 32, dtype=torch.float64)]}, "float64"),
        ({"scale": [torch.ones(2, 32, dtype=torch.int64)]}, "int64"),
        ({"per_token_scale": [torch.ones(2)]}, "row scales"),
        ({"bias": [torch.ones(2, 32)]}, "no bias"),
        ({"offset": [torch.ones(2, 32)]}, "offset"),
        ({"group_list": torch.tensor([2, 2])}, r"fit the rows|outside"),
        ({"group_list": torch.tensor([4, -1])}, r"fit the rows|outside"),
        ({"weight": torch.zeros((2, 16, 32))}, "float32"),
        ({"weight": torch.zeros((2, 16, 4), dtype=torch.int32)}, "int64 bits"),
    ],
)
def test_what_the_device_would_refuse_is_refused(
    kernels: Any, changes: dict[str, Any], reason: str
) -> None:
    refused(kernels)
    with pytest.raises(ValueError, match=reason):
        refused(kernels, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bias": None}, "need a float32 bias"),
        ({"group_list_type": 0, "group_list": torch.tensor([1, 3])}, "counts"),
        ({"scale": [torch.ones(2, 32, dtype=torch.int64)]}, "entry per group"),
        ({"output_dtype": torch.int32, "scale": None}, "int8 weights"),
    ],
)
def test_int4_needs_its_own_arguments(kernels: Any, changes: dict[str, Any], reason: str) -> None:
    right = {
        "weight": torch.zeros((2, 16, 4), dtype=torch.int32),
        "scale": [torch.ones((2, 1, 32), dtype=torch.int64)],
        "bias": [torch.zeros(2, 32)],
    }
    refused(kernels, **right)
    with pytest.raises(ValueError, match=reason):
        refused(kernels, **(right | changes))


def test_a_part_of_a_packed_weight_is_refused(kernels: Any, generator: torch.Generator) -> None:
    packed = nz.pack(random_int8(generator, 4, 16, 32))
    with pytest.raises(ValueError, match=r"packed|part"):
        refused(kernels, weight=packed[:2])
