"""Routing and expert products against plain formulas."""

from typing import Any

import pytest
import torch

from services.worker.ops import dense, registry


def route(kernels: Any, logits: torch.Tensor, k: int, **changes: Any) -> Any:
    arguments = {
        "bias": torch.zeros(logits.shape[1]),
        "group_select_mode": 1,
        "norm_type": 1,
        "routed_scaling_factor": 2.5,
        "eps": 1e-20,
    } | changes
    return kernels["npu_moe_gating_top_k"](logits, k, **arguments)


@pytest.mark.parametrize(("groups", "open_groups"), [(1, 1), (4, 2), (8, 3)])
def test_gating_equals_the_router_formula(
    kernels: Any, generator: torch.Generator, groups: int, open_groups: int
) -> None:
    logits = torch.randn((40, 32), generator=generator) * 2
    bias = torch.randn(32, generator=generator)
    weights, experts, _ = route(
        kernels, logits, 4, bias=bias, k_group=open_groups, group_count=groups
    )
    for token in range(40):
        scores = [1 / (1 + torch.exp(-x).item()) for x in logits[token]]
        choice = [score + shift for score, shift in zip(scores, bias.tolist(), strict=True)]
        size = 32 // groups
        ranks = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        is_open = sorted(range(groups), key=lambda g: -ranks[g])[:open_groups]
        allowed = [e for e in range(32) if e // size in is_open]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:4]
        assert sorted(experts[token].tolist()) == sorted(chosen)
        total = sum(scores[e] for e in chosen)
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            assert weight == pytest.approx(scores[expert] / total * 2.5, rel=1e-5)


def test_the_bias_moves_the_choice_but_not_the_weights(kernels: Any) -> None:
    logits = torch.zeros((1, 4))
    weights, experts, _ = route(kernels, logits, 2, bias=torch.tensor([0.0, 9.0, 0.0, 5.0]))
    assert sorted(experts[0].tolist()) == [1, 3]
    assert weights[0].tolist() == pytest.approx([1.25, 1.25])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm_type": 0}, "norm_type"),
        ({"renorm": 1}, "renorm"),
        ({"out_flag": True}, "out_flag"),
        ({"group_count": 2, "group_select_mode": 0}, "group_select_mode"),
        ({"group_count": 3}, "group_count"),
    ],
)
def test_gating_refuses_what_it_does_not_compute(
    kernels: Any, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        route(kernels, torch.zeros((1, 4)), 2, **change)


def sort_rows(kernels: Any, x: torch.Tensor, experts: torch.Tensor, **changes: Any) -> Any:
    arguments = {
        "active_num": experts.numel(),
        "expert_num": 6,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 6],
        "quant_mode": -1,
    } | changes
    return kernels["npu_moe_init_routing_v2"](x, experts, **arguments)


@pytest.mark.parametrize("active", [[0, 6], [2, 5]])
def test_routing_sorts_copies_by_expert_and_keeps_their_order(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator, active: list[int]
) -> None:
    x = torch.randn((9, 20), generator=generator).to(dtype)
    experts = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(9)]).int()
    rows, order, counts, _ = sort_rows(kernels, x, experts, active_expert_range=active)
    copies = [
        (expert, copy)
        for copy, expert in enumerate(experts.flatten().tolist())
        if active[0] <= expert < active[1]
    ]
    wanted = [copy for _, copy in sorted(copies)]
    assert counts.tolist() == [
        sum(1 for e, _ in copies if e == expert) for expert in range(*active)
    ]
    assert counts.dtype == torch.int64
    for row, copy in enumerate(wanted):
        assert torch.equal(rows[row], x[copy // 2])
        assert order[copy] == row
    foreign = set(range(18)) - set(wanted)
    assert all(order[copy] == -1 for copy in foreign)


@pytest.mark.parametrize("active", [[0, 6], [2, 5]])
def test_routing_quantizes_rows_on_the_way(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator, active: list[int]
) -> None:
    x = torch.randn((9, 52), generator=generator).to(dtype)
    x[4] = 0
    experts = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(9)]).int()
    rows, order, counts, scales = sort_rows(
        kernels, x, experts, active_expert_range=active, quant_mode=1
    )
    plain, plain_order, plain_counts, _ = sort_rows(kernels, x, experts, active_expert_range=active)
    total = int(counts.sum())
    assert torch.equal(order, plain_order)
    assert torch.equal(counts, plain_counts)
    assert (rows.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert (rows.shape, scales.shape) == ((18, 52), (18,))
    wanted = plain[:total].double()
    scale = wanted.abs().amax(-1) / 127
    torch.testing.assert_close(scales[:total].double(), scale, rtol=2**-23, atol=0.0)
    # Half a level, and a rounding of the division.
    error = rows[:total].double() * scales[:total, None].double() - wanted
    assert bool((error.abs() <= scale[:, None] * (0.5 + 127 * 2**-23)).all())
    assert rows[:total][wanted.abs().amax(-1) == 0].count_nonzero() == 0


def test_routing_carries_the_scales_of_rows_that_are_int8(
    kernels: Any, generator: torch.Generator
) -> None:
    x = torch.randint(-128, 128, (9, 21), generator=generator, dtype=torch.int8)
    given = torch.rand(9, generator=generator)
    experts = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(9)]).int()
    rows, order, counts, scales = sort_rows(
        kernels, x, experts, scale=given, active_expert_range=[1, 4]
    )
    for copy, row in enumerate(order.tolist()):
        if row >= 0:
            assert torch.equal(rows[row], x[copy // 2])
            assert scales[row] == given[copy // 2]
    assert int(counts.sum()) == int((order >= 0).sum())


@pytest.mark.parametrize(
    ("x", "changes", "reason"),
    [
        (torch.zeros(1, 4), {"quant_mode": 0}, "quant_mode"),
        (torch.zeros((1, 4), dtype=torch.int8), {}, "needs a scale"),
        (torch.zeros((1, 4), dtype=torch.int8), {"scale": torch.ones(2)}, "needs a scale"),
        (torch.zeros((1, 4), dtype=torch.int8), {"quant_mode": 1}, "quantized again"),
        (torch.zeros(1, 4), {"scale": torch.ones(1)}, "scale belongs"),
        (torch.zeros(1, 4), {"scale": torch.ones(6, 4), "quant_mode": 1}, "scale belongs"),
        (torch.zeros((1, 4), dtype=torch.float64), {}, "float64"),
    ],
)
def test_routing_refuses_rows_it_cannot_quantize(
    kernels: Any, x: torch.Tensor, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        sort_rows(kernels, x, torch.zeros((1, 1), dtype=torch.int32), **changes)


def test_routing_refuses_cumulative_counts(kernels: Any) -> None:
    with pytest.raises(ValueError, match="counts"):
        sort_rows(
            kernels,
            torch.zeros((1, 4)),
            torch.zeros((1, 1), dtype=torch.int32),
            expert_tokens_num_type=0,
        )


@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize(("inner", "outer"), [(192, 256), (33, 40)])
def test_grouped_product_equals_one_product_per_group(
    kernels: Any,
    dtype: torch.dtype,
    generator: torch.Generator,
    list_type: int,
    inner: int,
    outer: int,
) -> None:
    counts = torch.tensor([3, 0, 1, 21, 9])
    x = torch.randn((40, inner), generator=generator).to(dtype)
    weight = torch.randn((5, inner, outer), generator=generator).to(dtype)
    result = kernels["npu_grouped_matmul"](
        [x],
        [weight],
        group_list=counts if list_type else counts.cumsum(0),
        split_item=2,
        group_type=0,
        group_list_type=list_type,
    )[0]
    exact = torch.cat(
        [
            part.double() @ matrix.double()
            for part, matrix in zip(x[:34].split(counts.tolist()), weight, strict=True)
        ]
    )
    # float32: sums of 192 products in another order. bfloat16: one rounding of values near 14.
    bound = 1e-4 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(result[:34].double(), exact, atol=bound * 4, rtol=bound)


@pytest.mark.parametrize("counts", [[0, 1, 1, 0, 1], [3, 0, 1, 21, 9], [0, 0, 0, 0, 0]])
def test_packed_experts_give_the_same_bits_as_plain_ones_whatever_is_beside_a_row(
    compiled: dict[str, Any], dtype: torch.dtype, generator: torch.Generator, counts: list[int]
) -> None:
    x = torch.randn((sum(counts) + 2, 65), generator=generator).to(dtype)
    weight = torch.randn((5, 65, 150), generator=generator).to(dtype)

    def multiply(kernels: Any, rows: torch.Tensor, form: torch.Tensor, counts: list[int]) -> Any:
        product = kernels["npu_grouped_matmul"](
            [rows], [form], group_list=torch.tensor(counts), split_item=2, group_type=0,
            group_list_type=1,
        )[0]  # fmt: skip
        return product[: sum(counts)]

    for native in compiled.values():
        kernels = registry.cpu_kernels(native)
        packed = dense.kernels(native)["pack_weight"](weight)
        together = multiply(kernels, x, packed, counts)
        assert torch.equal(together, multiply(kernels, x, weight, counts))
        owners = [group for group, count in enumerate(counts) for _ in range(count)]
        for row, owner in enumerate(owners):
            alone = [int(group == owner) for group in range(5)]
            assert torch.equal(multiply(kernels, x[row:], packed, alone)[0], together[row])
        with pytest.raises(ValueError, match="was cut or copied"):
            multiply(kernels, x, packed.clone(), counts)


def test_grouped_rows_do_not_depend_on_the_group_size(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.randn((13, 64), generator=generator).to(dtype)
    weight = torch.randn((1, 64, 96), generator=generator).to(dtype)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return kernels["npu_grouped_matmul"](
            [rows], [weight], group_list=torch.tensor([len(rows)]), split_item=2, group_type=0,
            group_list_type=1,
        )[0]  # fmt: skip

    bound = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(multiply(x)[:1], multiply(x[:1]), atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"split_item": 0}, "split_item"),
        ({"group_type": -1}, "group_type"),
        ({"bias": [torch.zeros(4)]}, "bias"),
        ({"group_list": torch.tensor([1, 1])}, "group_list"),
    ],
)
def test_grouped_product_refuses_other_layouts(
    kernels: Any, change: dict[str, Any], reason: str
) -> None:
    arguments = {"group_list": torch.tensor([1]), "split_item": 2, "group_type": 0} | change
    with pytest.raises(ValueError, match=reason):
        kernels["npu_grouped_matmul"]([torch.zeros((1, 4))], [torch.zeros((1, 4, 4))], **arguments)


def test_swiglu_gates_the_second_half_by_the_first(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = (torch.randn((11, 70), generator=generator) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + torch.exp(-gate)) * up
    bound = 1e-5 if dtype == torch.float32 else 2**-7  # one rounding
    torch.testing.assert_close(kernels["npu_swiglu"](x).double(), exact, atol=bound, rtol=bound)


@pytest.mark.parametrize("value", [-200.0, -90.0, 90.0, 200.0])
def test_swiglu_is_finite_at_the_extremes(kernels: Any, value: float) -> None:
    result = kernels["npu_swiglu"](torch.tensor([[value, 1.0]]))
    assert result.item() == pytest.approx(max(value, 0.0), abs=1e-30)


def test_unpermute_is_the_weighted_sum_of_the_copies(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    rows = torch.randn((12, 100), generator=generator).to(dtype)
    order = torch.randperm(12, generator=generator).int()
    weights = torch.rand((4, 3), generator=generator).to(dtype)
    result = kernels["npu_moe_token_unpermute"](rows, order, weights)
    for token in range(4):
        exact = sum(
            weights[token, j].double() * rows[order[token * 3 + j]].double() for j in range(3)
        )
        bound = 1e-5 if dtype == torch.float32 else 2**-7  # one rounding
        torch.testing.assert_close(result[token].double(), exact, atol=bound, rtol=bound)
