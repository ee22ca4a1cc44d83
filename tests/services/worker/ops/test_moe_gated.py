"""The gated unit in int8, alone and behind the first product, against a float64 formula."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz, registry

COUNTS = [3, 0, 1, 61, 9]  # an empty group, one row, more rows than share a strip
IN_GROUPS = 74
ROWS = 80

FUSED = "npu_grouped_matmul_swiglu_quant_v2"
GATED = "npu_dequant_swiglu_quant"


def random_int8(generator: torch.Generator, *shape: int, low: int = -128) -> torch.Tensor:
    return torch.randint(low, -low, shape, generator=generator, dtype=torch.int8)


def random_scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 1e-2 + 1e-4


def by_row(values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return values.repeat_interleave(torch.tensor(counts), dim=0)


def exact_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = x[:IN_GROUPS].split(COUNTS)
    return torch.cat([p.long() @ m.long() for p, m in zip(parts, weight, strict=True)])


def gated(sums: torch.Tensor, column_scale: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` in float64; one row of column scales for each row of sums."""
    values = sums.double() * column_scale.double() * row_scale[: len(sums), None].double()
    gate, up = values.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def check(rows: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor) -> None:
    """Quantized rows are the wanted values to half a level, and the largest one is 127."""
    assert rows.dtype is torch.int8
    assert scales.dtype is torch.float32
    rows, scales = rows[: len(wanted)], scales[: len(wanted)]
    # silu by a polynomial exp of 2 ulp and a few roundings: 2^-20 of the largest value.
    torch.testing.assert_close(scales.double(), wanted.abs().amax(-1) / 127, rtol=2**-20, atol=0.0)
    levels = wanted / scales[:, None].double()
    assert float((levels - rows.double()).abs().max()) <= 0.5 + 127 * 2**-19
    assert rows.abs().amax(-1).tolist() == [127] * len(rows)


def pack_pairs(weight: torch.Tensor) -> torch.Tensor:
    """int4 values [..., N] packed, two to a byte, then viewed as int32 as a checkpoint's are."""
    pairs = (weight[..., ::2] & 15) | (weight[..., 1::2] << 4)
    return nz.pack(pairs.contiguous()).view(torch.int32)


@pytest.mark.parametrize(("inner", "outer"), [(192, 128), (64, 96), (600, 192), (37, 36)])
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("list_type", [0, 1])
def test_the_fused_product_quantizes_the_gated_unit(
    kernels: Any,
    generator: torch.Generator,
    list_type: int,
    scale_type: torch.dtype,
    inner: int,
    outer: int,
) -> None:
    x, weight = random_int8(generator, ROWS, inner), random_int8(generator, 5, inner, outer)
    scale = random_scales(generator, 5, outer).to(scale_type)
    row_scale, counts = random_scales(generator, ROWS), torch.tensor(COUNTS)
    rows, scales = kernels[FUSED](
        x,
        [nz.pack(weight)],
        [scale],
        row_scale,
        counts if list_type else counts.cumsum(0),
        group_list_type=list_type,
    )
    assert rows.shape == (ROWS, outer // 2)
    assert scales.shape == (ROWS,)
    wanted = gated(exact_sums(x, weight), by_row(scale, COUNTS), row_scale)
    check(rows, scales, wanted)


@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize(("inner", "outer"), [(192, 128), (64, 96), (46, 48)])
def test_the_fused_product_of_int4_is_that_of_plain_integers(
    kernels: Any, generator: torch.Generator, list_type: int, inner: int, outer: int
) -> None:
    x, weight = random_int8(generator, ROWS, inner), random_int8(generator, 5, inner, outer, low=-8)
    scale, row_scale = random_scales(generator, 5, outer), random_scales(generator, ROWS)
    counts = torch.tensor(COUNTS)
    rows, scales = kernels[FUSED](
        x,
        [pack_pairs(weight)],
        [scale.view(torch.int32).to(torch.int64)],
        row_scale,
        counts if list_type else counts.cumsum(0),
        weight_assist_matrix=[8.0 * weight.sum(1).float() * scale],
        group_list_type=list_type,
    )
    wanted = gated(exact_sums(x, weight), by_row(scale, COUNTS), row_scale)
    check(rows, scales, wanted)


def test_a_fused_row_does_not_depend_on_the_rows_beside_it(
    kernels: Any, generator: torch.Generator
) -> None:
    x, weight = random_int8(generator, ROWS, 100), nz.pack(random_int8(generator, 5, 100, 128))
    scale, row_scale = random_scales(generator, 5, 128), random_scales(generator, ROWS)
    together = kernels[FUSED](
        x, [weight], [scale], row_scale, torch.tensor(COUNTS), group_list_type=1
    )
    for row, group in [(0, 0), (3, 2), (40, 3), (73, 4)]:
        counts = torch.zeros(5, dtype=torch.int64)
        counts[group] = 1
        rows, scales = kernels[FUSED](
            x[row : row + 1], [weight], [scale], row_scale[row : row + 1], counts, group_list_type=1
        )
        assert torch.equal(rows[0], together[0][row])
        assert scales[0] == together[1][row]


def test_garbage_past_the_last_group_reaches_no_row(
    kernels: Any, generator: torch.Generator
) -> None:
    """A device leaves there whatever lay in memory, and the next product must not read it."""
    x, weight = random_int8(generator, ROWS, 64), random_int8(generator, 5, 64, 128)
    second, scale = random_int8(generator, 5, 64, 32), random_scales(generator, 5, 128)
    row_scale, counts = random_scales(generator, ROWS), torch.tensor(COUNTS)

    def run(garbage: int, number: float) -> tuple[torch.Tensor, ...]:
        x[IN_GROUPS:], row_scale[IN_GROUPS:] = garbage, number
        rows, scales = kernels[FUSED](
            x, [nz.pack(weight)], [scale], row_scale, counts, group_list_type=1
        )
        found = rows[:IN_GROUPS].clone(), scales[:IN_GROUPS].clone()
        rows[IN_GROUPS:], scales[IN_GROUPS:] = garbage, number
        products = kernels["npu_grouped_matmul"](
            [rows], [second], scale=[scale[:, :32].contiguous()], per_token_scale=[scales],
            group_list=counts, group_list_type=1, split_item=2, group_type=0,
            output_dtype=torch.bfloat16,
        )[0]  # fmt: skip
        return *found, products[:IN_GROUPS]

    for ours, theirs in zip(run(0, 1.0), run(-128, float("nan")), strict=True):
        assert torch.equal(ours, theirs)


def test_threads_do_not_change_the_fused_product(
    compiled: dict[str, Any], generator: torch.Generator
) -> None:
    native = next(iter(compiled.values()))
    kernels: Any = registry.cpu_kernels(native)
    x, weight = random_int8(generator, 400, 256), nz.pack(random_int8(generator, 5, 256, 192))
    scale, row_scale = random_scales(generator, 5, 192), random_scales(generator, 400)
    counts = torch.tensor([100, 0, 50, 249, 1])
    results = []
    for threads in (1, 3):
        native.set_num_threads(threads)
        results.append(kernels[FUSED](x, [weight], [scale], row_scale, counts, group_list_type=1))
    native.set_num_threads(1)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize("width", [64, 50])
def test_sums_are_scaled_gated_and_quantized_by_group(
    kernels: Any, generator: torch.Generator, is_left: bool, width: int
) -> None:
    x = torch.randint(-100000, 100000, (ROWS, 2 * width), generator=generator, dtype=torch.int32)
    scale, row_scale = random_scales(generator, 5, 2 * width), random_scales(generator, ROWS)
    rows, scales = kernels[GATED](
        x,
        weight_scale=scale,
        activation_scale=row_scale,
        group_index=torch.tensor(COUNTS),
        activate_left=is_left,
        quant_mode=1,
    )
    factors, sums = by_row(scale, COUNTS), x[:IN_GROUPS]
    if not is_left:
        factors, sums = factors.roll(width, dims=1), sums.roll(width, dims=1)
    check(rows, scales, gated(sums, factors, row_scale))


@pytest.mark.parametrize("shape", [(96,), (1, 96)])
def test_without_groups_all_rows_share_one_scale(
    kernels: Any, generator: torch.Generator, shape: tuple[int, ...]
) -> None:
    x = torch.randint(-1000, 1000, (7, 96), generator=generator, dtype=torch.int32)
    scale, row_scale = random_scales(generator, *shape), random_scales(generator, 7)
    rows, scales = kernels[GATED](
        x, weight_scale=scale, activation_scale=row_scale, activate_left=True, quant_mode=1
    )
    check(rows, scales, gated(x, scale.view(1, 96), row_scale))


def test_fused_and_unfused_first_products_agree(kernels: Any, generator: torch.Generator) -> None:
    x, weight = random_int8(generator, ROWS, 192), nz.pack(random_int8(generator, 5, 192, 128))
    scale, row_scale = random_scales(generator, 5, 128), random_scales(generator, ROWS)
    counts = torch.tensor(COUNTS)
    fused = kernels[FUSED](x, [weight], [scale], row_scale, counts, group_list_type=1)
    sums = kernels["npu_grouped_matmul"](
        [x], [weight], group_list=counts, group_list_type=1, split_item=3, group_type=0,
        output_dtype=torch.int32,
    )[0]  # fmt: skip
    unfused = kernels[GATED](
        sums, weight_scale=scale, activation_scale=row_scale, group_index=counts,
        activate_left=True, quant_mode=1,
    )  # fmt: skip
    # The same formula, but multiplications and additions may be joined differently.
    difference = (fused[0][:IN_GROUPS].int() - unfused[0][:IN_GROUPS].int()).abs()
    assert int(difference.max()) <= 1
    torch.testing.assert_close(fused[1][:IN_GROUPS], unfused[1][:IN_GROUPS], rtol=2**-20, atol=0.0)


def test_a_row_of_zero_sums_has_scale_zero(kernels: Any) -> None:
    rows, scales = kernels[GATED](
        torch.zeros((2, 8), dtype=torch.int32),
        weight_scale=torch.ones(8),
        activation_scale=torch.ones(2),
        activate_left=True,
        quant_mode=1,
    )
    assert rows.count_nonzero() == 0
    assert scales.tolist() == [0.0, 0.0]


def fused(kernels: Any, **changes: Any) -> None:
    arguments = {
        "x": torch.zeros((3, 16), dtype=torch.int8),
        "weight": [nz.pack(torch.zeros((2, 16, 32), dtype=torch.int8))],
        "weight_scale": [torch.ones(2, 32)],
        "x_scale": torch.ones(3),
        "group_list": torch.tensor([1, 3]),
    } | changes
    kernels[FUSED](**arguments)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": [torch.zeros((2, 16, 32), dtype=torch.int8)]}, "NZ"),
        ({"weight": [nz.pack(torch.zeros((2, 8, 32), dtype=torch.int8))]}, r"\[M, 8\]"),
        ({"weight": [nz.pack(torch.zeros((2, 16, 4), dtype=torch.int32))]}, "int64 bits"),
        ({"weight_scale": [torch.ones(2, 30)]}, "scale"),
        ({"x_scale": torch.ones(2)}, "row scales"),
        ({"group_list": torch.tensor([1, 3, 3])}, "group_list"),
        ({"group_list": torch.tensor([1, 4])}, r"fit the rows|outside"),
        ({"weight_assist_matrix": [torch.ones(2, 32)]}, "no bias"),
        ({"smooth_scale": torch.ones(2)}, "smooth_scale"),
        ({"dequant_mode": 1}, "dequant_mode"),
    ],
)
def test_what_the_fused_product_would_refuse_is_refused(
    kernels: Any, changes: dict[str, Any], reason: str
) -> None:
    fused(kernels)
    with pytest.raises(ValueError, match=reason):
        fused(kernels, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(3, 8)}, "int32"),
        ({"x": torch.zeros((3, 7), dtype=torch.int32)}, "two halves"),
        ({"weight_scale": None}, "weight_scale"),
        ({"weight_scale": torch.ones(2, 8)}, "weight_scale"),
        ({"activation_scale": torch.ones(2)}, "activation_scale"),
        ({"activation_scale": torch.ones(3, dtype=torch.bfloat16)}, "float32"),
        ({"quant_mode": 0}, "quant_mode"),
        ({"group_index": torch.tensor([4])}, r"fit the rows|outside"),
        ({"group_index": torch.tensor([3], dtype=torch.int32)}, "int64"),
        ({"swiglu_mode": 1}, "swiglu_mode"),
    ],
)
def test_what_the_gated_unit_would_refuse_is_refused(
    kernels: Any, changes: dict[str, Any], reason: str
) -> None:
    right = {
        "x": torch.zeros((3, 8), dtype=torch.int32),
        "weight_scale": torch.ones(8),
        "activation_scale": torch.ones(3),
        "activate_left": True,
        "quant_mode": 1,
    }
    kernels[GATED](**right)
    with pytest.raises(ValueError, match=reason):
        kernels[GATED](**(right | changes))
