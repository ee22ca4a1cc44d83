"""Attention over packed rows against plain float formulas on the same rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

LATENT, ROPE, TILE, ROW = 512, 64, 128, 656
SCALE = 0.05
# float32: two ways to sum 576 products and up to 300 weights differ by a few 1e-6 of values near 1.
# bfloat16: a row is rounded when it is brought back, as on the device (2^-9 relative), weights and
# output again; the errors of one logit, 512 products of that size at random, stay near 1e-3.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
EIGHTS = pytest.mark.parametrize("eight", LIMITS, ids=lambda dtype: str(dtype)[6:])


def pack(latent: torch.Tensor, rope: torch.Tensor, eight: torch.dtype) -> torch.Tensor:
    """Rows [..., 656] of latents [..., 512] and rotated keys [..., 64]."""
    tiles = latent.float().unflatten(-1, (-1, TILE))
    scales = tiles.abs().amax(-1) / LIMITS[eight]
    lanes = (tiles / scales[..., None]).flatten(-2)
    lanes = (lanes.round() if eight == torch.int8 else lanes).to(eight)
    parts = [lanes, rope.to(torch.bfloat16), scales]
    return torch.cat([part.contiguous().view(torch.int8) for part in parts], -1).view(eight)


def unpack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 latents and rotated keys of packed rows [N, 656]."""
    lanes, rope, scales = (p.contiguous() for p in rows.view(torch.int8).split([512, 128, 16], -1))
    tiles = lanes.view(rows.dtype).double().view(-1, LATENT // TILE, TILE)
    latent = tiles * scales.view(torch.float32).double()[..., None]
    return latent.view(-1, LATENT), rope.view(torch.bfloat16).double()


def inputs(
    step: Any, heads: int, dtype: torch.dtype, eight: torch.dtype, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    latent = torch.randn((step.num_blocks, 128, 1, LATENT), generator=generator)
    rope = torch.randn((step.num_blocks, 128, 1, ROPE), generator=generator)
    return {
        "query": torch.randn((step.num_tokens, heads, 576), generator=generator).to(dtype),
        "latent": latent,
        "rope": rope,
        "cache": pack(latent, rope, eight),
    }


def run(
    kernels: Any, step: Any, data: dict[str, Any], positions: torch.Tensor, **changes: Any
) -> torch.Tensor:
    arguments = {
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "block_table": step.block_table,
        "actual_seq_lengths_query": step.lengths["cum"],
        "actual_seq_lengths_kv": step.lengths["seq"],
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
        "quant_scale_repo_mode": 1,
        "tile_size": 128,
        "rope_head_dim": 64,
    } | changes
    return kernels["npu_kv_quant_sparse_flash_attention"](
        data["query"], data["cache"], changes.pop("value", data["cache"]), positions, SCALE,
        **{name: value for name, value in arguments.items() if name != "value"},
    )  # fmt: skip


def listed(positions: torch.Tensor, token: int, limit: int) -> list[int]:
    """Up to the first -1, without what lies past the bound."""
    chosen = []
    for position in positions[token, 0, :limit].tolist():
        if position < 0:
            break
        if position < limit:
            chosen.append(position)
    return chosen


def rows_of(step: Any, cache: torch.Tensor, sequence: int, chosen: list[int]) -> torch.Tensor:
    blocks = [int(step.block_table[sequence, at // 128]) for at in chosen]
    return cache.view(torch.int8)[blocks, [at % 128 for at in chosen], 0].view(cache.dtype)


def expected(step: Any, data: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """One token at a time, float64."""
    output = torch.zeros((*data["query"].shape[:2], LATENT), dtype=torch.float64)
    for token, sequence, limit in step.rows():
        chosen = listed(positions, token, limit)
        if not chosen:
            continue
        latent, rope = unpack(rows_of(step, data["cache"], sequence, chosen))
        logits = data["query"][token].double() @ torch.cat((latent, rope), -1).T
        output[token] = torch.softmax(logits * SCALE, -1) @ latent
    return output


def random_positions(step: Any, width: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct positions in no order; some rows short, some with a stray one past the bound."""
    positions = torch.full((step.num_tokens, 1, width), -1, dtype=torch.int32)
    for token, _, limit in step.rows():
        order = torch.randperm(limit, generator=generator)[:width]
        count = len(order) if token % 3 else len(order) // 2
        positions[token, 0, :count] = order[:count].to(torch.int32)
        if count and token % 5 == 0:
            positions[token, 0, 0] = limit + 1
    return positions


@EIGHTS
@pytest.mark.parametrize("heads", [1, 4, 16, 64])
def test_attention_equals_the_formula_in_a_mixed_step(
    kernels: Any,
    dtype: torch.dtype,
    eight: torch.dtype,
    heads: int,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([1, 7, 3, 1], [300, 7, 140, 1])
    data = inputs(step, heads, dtype, eight, generator)
    positions = random_positions(step, 70, generator)
    result = run(kernels, step, data, positions)
    assert (result.shape, result.dtype) == ((12, heads, LATENT), dtype)
    torch.testing.assert_close(
        result.double(),
        expected(step, data, positions),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


def test_few_tokens_with_many_heads_give_what_many_tokens_give(
    kernels: Any, dtype: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    """The heads of a token may be cut into parts: no row may depend on that."""
    step = make_step([9], [300])
    data = inputs(step, 64, dtype, torch.int8, generator)
    positions = random_positions(step, 70, generator)
    together = run(kernels, step, data, positions)
    alone = make_step([1], [300])
    object.__setattr__(alone, "block_table", step.block_table)
    last = data | {"query": data["query"][8:]}
    torch.testing.assert_close(
        run(kernels, alone, last, positions[8:]), together[8:], atol=1e-6, rtol=1e-6
    )


@EIGHTS
def test_the_error_against_unquantized_rows_is_that_of_the_quantization(
    kernels: Any, eight: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    """A lane is off by d, a logit by e: weights change by no more than a factor exp(2 max e)."""
    step = make_step([1], [300])
    data = inputs(step, 4, torch.float32, eight, generator)
    positions = torch.arange(300, dtype=torch.int32).view(1, 1, -1)
    latent, rope = (
        torch.stack([step.cached(data[name], 0, at) for at in range(300)]).double()
        for name in ("latent", "rope")
    )
    kept, kept_rope = unpack(rows_of(step, data["cache"], 0, list(range(300))))
    query = data["query"][0].double() * SCALE
    exact = torch.softmax(query @ torch.cat((latent, rope), -1).T, -1) @ latent
    off_by = torch.cat((kept - latent, kept_rope - rope), -1)
    largest_logit_error = float((query @ off_by.T).abs().max())
    bound = float((kept - latent).abs().max())
    bound += (torch.e ** (2 * largest_logit_error) - 1) * float(latent.abs().max())
    error = (run(kernels, step, data, positions)[0].double() - exact).abs().max()
    assert error <= bound
    # int8: half a step of 1 / 127 of the largest lane; float8: half a step of 1 / 8 of the lane.
    steps = {torch.int8: 1 / 254, torch.float8_e4m3fn: 1 / 16}
    assert (kept - latent).abs().max() <= latent.abs().max() * steps[eight] * (1 + 1e-6)
    # Errors of many lanes and keys cancel: 300 near-even weights leave about 1/17 of them.
    assert error <= latent.abs().max() * steps[eight]


def test_positions_behind_the_first_gap_are_ignored(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([1], [50])
    data = inputs(step, 4, torch.float32, torch.int8, generator)
    short = torch.full((1, 1, 16), -1, dtype=torch.int32)
    short[0, 0, :3] = torch.tensor([4, 9, 30])
    with_more = short.clone()
    with_more[0, 0, 5] = 7
    assert torch.equal(run(kernels, step, data, with_more), run(kernels, step, data, short))


def test_a_row_without_positions_gives_zeros(
    kernels: Any, dtype: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([2, 3], [40, 0])
    data = inputs(step, 4, dtype, torch.int8, generator)
    positions = torch.full((5, 1, 16), -1, dtype=torch.int32)
    positions[1, 0, :2] = torch.tensor([0, 5])
    output = run(kernels, step, data, positions)
    assert output[0].count_nonzero() == 0
    assert output[1].count_nonzero() > 0
    assert output[2:].count_nonzero() == 0


def test_without_a_causal_bound_every_key_of_the_sequence_counts(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([2], [40])
    data = inputs(step, 4, torch.float32, torch.int8, generator)
    data["query"][0] = data["query"][1]
    positions = torch.arange(40, dtype=torch.int32).expand(2, 1, 40).contiguous()
    free = run(kernels, step, data, positions, sparse_mode=0)
    assert torch.equal(free[0], free[1])
    causal = run(kernels, step, data, positions)
    assert torch.equal(causal[1], free[1])
    assert not torch.equal(causal[0], free[0])


def test_a_broken_row_shows_as_nan_to_its_readers_alone(
    compiled: dict[str, Any], make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    from services.worker.ops import registry

    step = make_step([2], [40])
    data = inputs(step, 4, torch.float32, torch.int8, generator)
    block = int(step.block_table[0, 0])
    data["cache"][block, 3, 0, 640:644] = torch.tensor([float("nan")]).view(torch.int8)
    positions = torch.tensor([[[1, 2, -1]], [[3, 4, -1]]], dtype=torch.int32)
    for native in compiled.values():
        output = run(registry.cpu_kernels(native), step, data, positions)
        assert bool(output[0].isfinite().all())
        assert bool(output[1].isnan().all())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mode": 0}, "attention_mode"),
        ({"layout_query": "BSND"}, "layout_query"),
        ({"layout_kv": "BSND"}, "layout_kv"),
        ({"sparse_mode": 1}, "sparse_mode"),
        ({"sparse_block_size": 2}, "sparse_block_size"),
        ({"key_quant_mode": 1}, "key_quant_mode"),
        ({"value_quant_mode": 0}, "value_quant_mode"),
        ({"quant_scale_repo_mode": 0}, "quant_scale_repo_mode 0 must be 1"),
        ({"tile_size": 64}, "tile_size 64 must be 128"),
        ({"rope_head_dim": 32}, "rope_head_dim 32 must be 64"),
        ({"key_dequant_scale": torch.ones(1)}, "key_dequant_scale"),
        ({"value": torch.zeros(4, 128, 1, ROW, dtype=torch.int8)}, "value"),
    ],
)
def test_modes_the_device_refuses_are_refused(
    kernels: Any,
    change: dict[str, Any],
    reason: str,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([1], [5])
    data = inputs(step, 4, torch.float32, torch.int8, generator)
    with pytest.raises(ValueError, match=reason):
        run(kernels, step, data, torch.zeros((1, 1, 16), dtype=torch.int32), **change)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("query", torch.zeros(1, 4, 512), "576"),
        ("query", torch.zeros(1, 4, 576, dtype=torch.float16), "bfloat16 or float32"),
        ("cache", torch.zeros(4, 128, 1, 640, dtype=torch.int8), "656"),
        ("cache", torch.zeros(4, 128, 1, ROW, dtype=torch.uint8), "int8 or float8"),
    ],
)
def test_tensors_of_another_form_are_refused(
    kernels: Any,
    name: str,
    value: torch.Tensor,
    reason: str,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([1], [5])
    data = inputs(step, 4, torch.float32, torch.int8, generator) | {name: value}
    with pytest.raises(ValueError, match=reason):
        run(kernels, step, data, torch.zeros((1, 1, 16), dtype=torch.int32))


def test_a_block_outside_the_cache_is_refused(
    compiled: dict[str, Any], make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    from services.worker.ops import registry

    step = make_step([1], [300])
    data = inputs(step, 4, torch.float32, torch.int8, generator)
    step.block_table[0, 1] = step.num_blocks
    for native in compiled.values():
        with pytest.raises(ValueError, match="outside"):
            run(
                registry.cpu_kernels(native),
                step,
                data,
                torch.zeros((1, 1, 16), dtype=torch.int32),
            )
