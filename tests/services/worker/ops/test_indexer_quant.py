"""Selection on 8-bit keys against the formula with its roundings, one score at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

HEAD = 128
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
EIGHTS = pytest.mark.parametrize("eight", [INT8, FLOAT8], ids=["int8", "float8"])


def inputs(step: Any, heads: int, eight: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def lanes(*shape: int) -> torch.Tensor:
        if eight == FLOAT8:
            return random(*shape, HEAD).mul(100).to(FLOAT8)
        return torch.randint(-127, 128, (*shape, HEAD), generator=generator, dtype=INT8)

    tokens, blocks = step.num_tokens, step.num_blocks
    weight_type, scale_type = {
        INT8: (torch.float16, torch.float16),
        FLOAT8: (torch.bfloat16, torch.float32),
    }[eight]
    return {
        "query": lanes(tokens, heads),
        "key": lanes(blocks, 128, 1),
        "weights": random(tokens, heads).to(weight_type),
        "query_scale": random(tokens, heads).abs().mul(0.02).to(scale_type),
        "key_scale": random(blocks, 128, 1).abs().mul(0.02).to(scale_type),
    }


def run(kernels: Any, step: Any, data: dict[str, Any], width: int, **changes: Any) -> torch.Tensor:
    arguments = {
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "actual_seq_lengths_query": step.lengths["cum"],
        "actual_seq_lengths_key": step.lengths["seq"],
        "block_table": step.block_table,
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": width,
        "sparse_mode": 3,
    } | changes
    return kernels["npu_quant_lightning_indexer"](
        data["query"], data["key"], data["weights"], data["query_scale"], data["key_scale"],
        **arguments,
    )  # fmt: skip


def scores(step: Any, data: dict[str, Any], token: int, sequence: int, limit: int) -> torch.Tensor:
    """float64 but where the int8 form rounds to float16."""
    keys = torch.stack([step.cached(data["key"], sequence, at) for at in range(limit)]).double()
    scale = torch.stack(
        [step.cached(data["key_scale"][..., None], sequence, at) for at in range(limit)]
    )
    products = (data["query"][token].double() @ keys.T).relu()
    factors = data["weights"][token].double() * data["query_scale"][token].double()
    if data["query"].dtype == INT8:
        products = (products / 1024).half().double()
        factors = factors.half().double()
    return (factors @ products) * scale[:, 0].double()


@EIGHTS
@pytest.mark.parametrize("heads", [1, 8, 13, 64])
@pytest.mark.parametrize("width", [16, 64])
def test_the_best_positions_are_selected(
    kernels: Any,
    eight: torch.dtype,
    heads: int,
    width: int,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([1, 9, 4, 1], [290, 70, 15, 17])
    data = inputs(step, heads, eight, generator)
    selected = run(kernels, step, data, width)
    assert (selected.shape, selected.dtype) == ((15, 1, width), torch.int32)
    for token, sequence, limit in step.rows():
        row = selected[token, 0].tolist()
        count = min(limit, width)
        assert row[:count] == sorted(set(row[:count])), "ascending, each position once"
        assert row[count:] == [-1] * (width - count), "-1 behind the valid ones"
        assert all(0 <= at < limit for at in row[:count])
        exact = scores(step, data, token, sequence, limit)
        # float32 sums of up to 64 heads: errors of a few 2^-24 of the largest score.
        worst, due = exact[row[:count]].min(), exact.sort(descending=True).values[:count].min()
        assert worst >= due - 1e-5 * exact.abs().max()


def test_int8_rounds_where_the_device_does(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    """Products of 2049 and 2048 are one number in float16, so the lower position wins."""
    step = make_step([1], [3])
    data = inputs(step, 1, INT8, generator)
    data["query"].zero_()
    data["query"][..., :2] = torch.tensor([64, 1], dtype=INT8)
    block = int(step.block_table[0, 0])
    data["key"][block, :3] = 0
    data["key"][block, :3, 0, :2] = torch.tensor([[32, 0], [32, 1], [33, 1]], dtype=INT8)
    data["weights"].fill_(1.0)
    data["query_scale"].fill_(0.01)
    data["key_scale"].fill_(0.01)
    assert run(kernels, step, data, 1)[0, 0].tolist() == [2]
    assert run(kernels, step, data, 2)[0, 0].tolist() == [0, 2]


def test_small_and_large_factors_round_as_float16(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    """weight * scale: 2^-25 is half a step of the smallest float16, and falls to zero."""
    step = make_step([2], [3])
    data = inputs(step, 1, INT8, generator)
    data["query"].fill_(10)
    block = int(step.block_table[0, 0])
    data["key"][block, :3, 0] = torch.tensor([1, 2, 3], dtype=INT8)[:, None]
    data["key_scale"].fill_(1.0)
    data["query_scale"].fill_(2.0**-12)
    data["weights"][0], data["weights"][1] = 2.0**-13, 2.0**-12
    # A zero factor ties all positions; 2^-24 does not.
    assert run(kernels, step, data, 1)[:, 0].tolist() == [[0], [2]]
    step = make_step([1], [3])
    data = {name: value[:1] if name in {"query", "weights", "query_scale"} else value
            for name, value in data.items()}  # fmt: skip
    block = int(step.block_table[0, 0])
    data["key"][block, :3, 0] = torch.tensor([1, 2, 3], dtype=INT8)[:, None]
    data["weights"].fill_(60000.0)
    data["query_scale"].fill_(2.0)  # past float16: infinite, and all scores tie
    assert run(kernels, step, data, 1)[0, 0].tolist() == [0]


@EIGHTS
def test_every_position_is_selected_while_the_context_fits(
    kernels: Any, eight: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([3, 1], [64, 10])
    selected = run(kernels, step, inputs(step, 8, eight, generator), 64)
    for token, _, limit in step.rows():
        assert selected[token, 0, :limit].tolist() == list(range(limit))
        assert selected[token, 0, limit:].unique().tolist() in ([-1], [])


@EIGHTS
def test_ties_go_to_the_lower_position(
    kernels: Any, eight: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([1], [200])
    data = inputs(step, 8, eight, generator)
    data["key"].view(torch.int8).zero_()
    assert run(kernels, step, data, 16)[0, 0].tolist() == list(range(16))


def test_rows_without_keys_select_nothing(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([1, 4], [100, 0])
    selected = run(kernels, step, inputs(step, 8, INT8, generator), 16)
    assert selected[1:].unique().tolist() == [-1]


def test_selection_does_not_depend_on_chunking(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    whole = make_step([100], [300])
    data = inputs(whole, 8, INT8, generator)
    together = run(kernels, whole, data, 32)
    part = make_step([40], [300])
    object.__setattr__(part, "block_table", whole.block_table)
    tail = {name: value if name.startswith("key") else value[60:] for name, value in data.items()}
    assert torch.equal(run(kernels, part, tail, 32), together[60:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout_query": "BSND"}, "layout_query"),
        ({"layout_key": "TND"}, "layout_key"),
        ({"sparse_mode": 0}, "sparse_mode"),
        ({"sparse_count": 4096}, "sparse_count 4096"),
        ({"query_quant_mode": 1}, "query_quant_mode"),
        ({"key_quant_mode": 1}, "key_quant_mode"),
        ({"key_dtype": 290}, "key_dtype"),
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
    with pytest.raises(ValueError, match=reason):
        run(kernels, step, inputs(step, 8, INT8, generator), 16, **change)


@pytest.mark.parametrize(
    ("eight", "name", "change", "reason"),
    [
        (INT8, "key", lambda x: x.to(FLOAT8), "both be int8"),
        (INT8, "query", lambda x: x[..., :64].contiguous(), "128 wide"),
        (INT8, "query", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "not contiguous"),
        (INT8, "weights", lambda x: x.to(torch.bfloat16), "weights must not be"),
        (INT8, "weights", lambda x: x[:, :4], "weights must be"),
        (INT8, "query_scale", lambda x: x.float(), r"scales must be torch\.float16"),
        (INT8, "key_scale", lambda x: x[..., 0], "key_dequant_scale must be"),
        (FLOAT8, "key_scale", lambda x: x.half(), r"scales must be torch\.float32"),
        (FLOAT8, "weights", lambda x: x.float(), "weights must not be"),
    ],
)
def test_tensors_of_another_form_are_refused(
    kernels: Any,
    eight: torch.dtype,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([2], [5])
    data = inputs(step, 8, eight, generator)
    with pytest.raises(ValueError, match=reason):
        run(kernels, step, data | {name: change(data[name])}, 16)


def test_a_block_outside_the_cache_is_refused(
    compiled: dict[str, Any], make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    from services.worker.ops import registry

    step = make_step([1], [300])
    data = inputs(step, 8, INT8, generator)
    step.block_table[0, 1] = step.num_blocks
    for native in compiled.values():
        with pytest.raises(ValueError, match="outside"):
            run(registry.cpu_kernels(native), step, data, 16)
