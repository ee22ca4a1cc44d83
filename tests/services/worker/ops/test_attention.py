"""Sparse attention and per-head products against plain float32 formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.ops import dense, registry

LATENT, ROPE = 512, 64
# float32: two ways to sum 576 products and up to 300 weights differ by a few 1e-6 of values near 1.
# bfloat16: the output is rounded (2^-9 relative) and the fast kernel rounds each weight (2^-9).
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def inputs(step: Any, heads: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = step.num_tokens
    return {
        "query": random(tokens, heads, LATENT),
        "query_rope": random(tokens, heads, ROPE),
        "latent": random(step.num_blocks, 128, 1, LATENT),
        "rope": random(step.num_blocks, 128, 1, ROPE),
    }


def run(
    kernels: Any, step: Any, data: dict[str, Any], positions: torch.Tensor, **changes: Any
) -> torch.Tensor:
    arguments = {
        "block_table": step.block_table,
        "actual_seq_lengths_query": step.lengths["cum"],
        "actual_seq_lengths_kv": step.lengths["seq"],
        "query_rope": data["query_rope"],
        "key_rope": data["rope"],
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 3,
        "attention_mode": 2,
    } | changes
    return kernels["npu_sparse_flash_attention"](
        data["query"], data["latent"], data["latent"], positions, 0.05, **arguments
    )[0]


def expected(step: Any, data: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """One token and one position at a time."""
    output = torch.zeros(data["query"].shape)
    for token, sequence, limit in step.rows():
        chosen = []
        for position in positions[token, 0, :limit].tolist():
            if position < 0:
                break
            if position < limit:
                chosen.append(position)
        if not chosen:
            continue
        latent = torch.stack([step.cached(data["latent"], sequence, at) for at in chosen])
        rope = torch.stack([step.cached(data["rope"], sequence, at) for at in chosen])
        logits = data["query"][token].float() @ latent.T
        logits += data["query_rope"][token].float() @ rope.T
        output[token] = torch.softmax(logits * 0.05, -1) @ latent
    return output


def random_positions(step: Any, width: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct positions in no order; some rows short, one with a stray one past its bound."""
    positions = torch.full((step.num_tokens, 1, width), -1, dtype=torch.int32)
    for token, _, limit in step.rows():
        order = torch.randperm(limit, generator=generator)[:width]
        count = len(order) if token % 3 else len(order) // 2
        positions[token, 0, :count] = order[:count].to(torch.int32)
        if count:
            positions[token, 0, 0] = limit + 1 if token % 5 == 0 else positions[token, 0, 0]
    return positions


@pytest.mark.parametrize("heads", [1, 2, 4, 16])
def test_attention_equals_the_formula_in_a_mixed_step(
    kernels: Any,
    dtype: torch.dtype,
    heads: int,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([1, 7, 3, 1], [300, 7, 140, 1])
    data = inputs(step, heads, dtype, generator)
    positions = random_positions(step, 70, generator)
    torch.testing.assert_close(
        run(kernels, step, data, positions).float(),
        expected(step, data, positions),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


def test_positions_behind_the_first_gap_are_ignored(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([1], [50])
    data = inputs(step, 4, torch.float32, generator)
    listed = torch.full((1, 1, 16), -1, dtype=torch.int32)
    listed[0, 0, :3] = torch.tensor([4, 9, 30])
    with_more = listed.clone()
    with_more[0, 0, 5] = 7
    torch.testing.assert_close(
        run(kernels, step, data, with_more), run(kernels, step, data, listed), atol=0, rtol=0
    )


def test_a_row_without_positions_gives_zeros(
    kernels: Any, dtype: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([2, 3], [40, 0])
    data = inputs(step, 4, dtype, generator)
    positions = torch.full((5, 1, 16), -1, dtype=torch.int32)
    positions[1, 0, :2] = torch.tensor([0, 5])
    output = run(kernels, step, data, positions)
    assert output[0].count_nonzero() == 0
    assert output[1].count_nonzero() > 0
    assert output[2:].count_nonzero() == 0


def test_a_row_does_not_depend_on_its_neighbours(
    kernels: Any, dtype: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([1, 7, 3, 1], [300, 7, 140, 1])
    data = inputs(step, 4, dtype, generator)
    positions = random_positions(step, 70, generator)
    together = run(kernels, step, data, positions)
    alone = make_step([1], [300])
    first = {name: tensor[:1] if "query" in name else tensor for name, tensor in data.items()}
    object.__setattr__(alone, "block_table", step.block_table[:1])
    torch.testing.assert_close(
        run(kernels, alone, first, positions[:1]), together[:1], atol=1e-6, rtol=1e-6
    )


def all_positions(step: Any, width: int) -> torch.Tensor:
    """Every token sees everything up to itself."""
    positions = torch.full((step.num_tokens, 1, width), -1, dtype=torch.int32)
    for token, _, limit in step.rows():
        positions[token, 0, :limit] = torch.arange(limit)
    return positions


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([5], [5]), ([40, 1, 23], [40, 70, 150]), ([19, 19], [138, 261]), ([2, 3], [128, 129])],
)
def test_tokens_that_share_their_keys_get_the_bits_that_each_gets_alone(
    compiled: dict[str, Any],
    dtype: torch.dtype,
    make_step: Callable[..., Any],
    generator: torch.Generator,
    queries: list[int],
    keys: list[int],
    heads: int,
) -> None:
    step = make_step(queries, keys)
    data = inputs(step, heads, dtype, generator)
    positions = all_positions(step, max(keys) + 2)
    for native in compiled.values():
        kernels = registry.cpu_kernels(native)
        together = run(kernels, step, data, positions)
        torch.testing.assert_close(
            together.float(),
            expected(step, data, positions),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )
        native.set_num_threads(3)
        try:
            assert torch.equal(run(kernels, step, data, positions), together)
        finally:
            native.set_num_threads(1)
        for token, sequence, limit in step.rows():
            alone = make_step([1], [limit])
            object.__setattr__(alone, "block_table", step.block_table[sequence : sequence + 1])
            own = {n: t[token : token + 1] if "query" in n else t for n, t in data.items()}
            assert torch.equal(
                run(kernels, alone, own, positions[token : token + 1])[0], together[token]
            )


@pytest.mark.parametrize("heads", [4, 36])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_tokens_one_after_the_other_get_the_bits_that_each_gets_alone(
    compiled: dict[str, Any],
    dtype: torch.dtype,
    make_step: Callable[..., Any],
    generator: torch.Generator,
    is_ordered: bool,
    heads: int,
) -> None:
    """Lists of less than a tile and of several, empty ones among them; heads for several passes."""
    keys = [1, 2, 3, 0, 1, 64, 65, 0, 130, 5, 1, 1, 1, 63, 200, 128, 2, 129, 0]
    step = make_step([1] * len(keys), keys)
    data = inputs(step, heads, dtype, generator)
    positions = all_positions(step, 210) if is_ordered else random_positions(step, 150, generator)
    for native in compiled.values():
        kernels = registry.cpu_kernels(native)
        together = run(kernels, step, data, positions)
        torch.testing.assert_close(
            together.float(),
            expected(step, data, positions),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )
        native.set_num_threads(3)
        try:
            assert torch.equal(run(kernels, step, data, positions), together)
        finally:
            native.set_num_threads(1)
        for token, limit in enumerate(keys):
            alone = make_step([1], [limit])
            table = step.block_table[token : token + 1]
            object.__setattr__(alone, "block_table", table)
            own = {n: t[token : token + 1] if "query" in n else t for n, t in data.items()}
            found = run(kernels, alone, own, positions[token : token + 1])
            assert torch.equal(found[0], together[token])


@pytest.mark.parametrize("broken", [0, 6, 7, 20, 35])
def test_a_broken_row_shows_as_nan_to_its_readers_alone(
    compiled: dict[str, Any],
    dtype: torch.dtype,
    make_step: Callable[..., Any],
    generator: torch.Generator,
    broken: int,
) -> None:
    """Also where neighbours share a tile of keys, and behind the last key of the sequence."""
    step = make_step([36], [36])
    data = inputs(step, 4, dtype, generator)
    block = int(step.block_table[0, 0])
    for name in ("latent", "rope"):
        data[name][block, broken] = data[name][block, 36:] = float("nan")
    positions = all_positions(step, 40)
    for native in compiled.values():
        output = run(registry.cpu_kernels(native), step, data, positions)
        assert bool(output[:broken].isfinite().all())
        assert bool(output[broken:].isnan().all())


def test_a_list_that_leaves_positions_out_is_followed_among_whole_ones(
    compiled: dict[str, Any],
    dtype: torch.dtype,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([9], [30])
    data = inputs(step, 4, dtype, generator)
    positions = all_positions(step, 32)
    positions[4, 0, :26] = torch.cat((torch.arange(1, 26), torch.tensor([-1])))
    positions[6, 0, :2] = torch.tensor([1, 0])
    for native in compiled.values():
        torch.testing.assert_close(
            run(registry.cpu_kernels(native), step, data, positions).float(),
            expected(step, data, positions),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mode": 0}, "attention_mode"),
        ({"layout_query": "BSND"}, "layout_query"),
        ({"layout_kv": "BSND"}, "layout_kv"),
        ({"sparse_mode": 1}, "sparse_mode"),
        ({"sparse_block_size": 2}, "sparse_block_size"),
        ({"return_softmax_lse": True}, "LSE"),
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
    data = inputs(step, 4, torch.float32, generator)
    with pytest.raises(ValueError, match=reason):
        run(kernels, step, data, torch.zeros((1, 1, 16), dtype=torch.int32), **change)


def test_a_block_outside_the_cache_is_refused(
    compiled: dict[str, Any], make_step: Callable[..., Any], generator: torch.Generator
) -> None:

    step = make_step([1], [300])
    data = inputs(step, 4, torch.float32, generator)
    step.block_table[0, 1] = step.num_blocks
    for native in compiled.values():
        with pytest.raises(ValueError, match="outside"):
            run(
                registry.cpu_kernels(native),
                step,
                data,
                torch.zeros((1, 1, 16), dtype=torch.int32),
            )


@pytest.mark.parametrize(("tokens", "heads", "inner", "outer"), [(1, 4, 64, 512), (70, 2, 33, 40)])
def test_per_head_product_equals_einsum(
    kernels: Any,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    inner: int,
    outer: int,
    generator: torch.Generator,
) -> None:
    wide = torch.randn((tokens, heads, inner + 8), generator=generator).to(dtype)
    x = wide[..., :inner]  # heads and tokens lie apart, as in a slice of the query
    weight = torch.randn((heads, inner, outer), generator=generator).to(dtype)
    result = kernels["npu_transpose_batchmatmul"](x, weight, perm_x1=[1, 0, 2], perm_y=[1, 0, 2])
    exact = torch.einsum("thm,hmn->thn", x.float(), weight.float())
    # One rounding of the output; float32 sums of up to 64 terms differ in order only.
    bound = 1e-4 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(result.float(), exact, atol=bound * 8, rtol=bound)
    assert result.is_contiguous()


def test_packed_heads_give_the_same_bits_as_plain_ones(
    compiled: dict[str, Any], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.randn((3, 2, 64), generator=generator).to(dtype)
    weight = torch.randn((2, 64, 40), generator=generator).to(dtype)
    for native in compiled.values():
        multiply = registry.cpu_kernels(native)["npu_transpose_batchmatmul"]
        packed = dense.kernels(native)["pack_weight"](weight)
        swap = [1, 0, 2]
        result = multiply(x, packed, perm_x1=swap, perm_y=swap)
        assert torch.equal(result, multiply(x, weight, perm_x1=swap, perm_y=swap))
        with pytest.raises(ValueError, match="was cut or copied"):
            multiply(x, packed[..., :32], perm_x1=swap, perm_y=swap)
