"""Selection of positions against plain scores, on both sides of the selection width."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

HEAD = 128


def inputs(step: Any, heads: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "query": random(step.num_tokens, heads, HEAD),
        "key": random(step.num_blocks, 128, 1, HEAD),
        "weights": random(step.num_tokens, heads),
    }


def run(kernels: Any, step: Any, data: dict[str, Any], width: int, **changes: Any) -> torch.Tensor:
    arguments = {
        "actual_seq_lengths_query": step.lengths["cum"],
        "actual_seq_lengths_key": step.lengths["seq"],
        "block_table": step.block_table,
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": width,
    } | changes
    return kernels["npu_lightning_indexer"](
        data["query"], data["key"], data["weights"], **arguments
    )[0]


def scores(step: Any, data: dict[str, Any], token: int, sequence: int, limit: int) -> torch.Tensor:
    keys = torch.stack([step.cached(data["key"], sequence, at) for at in range(limit)]).double()
    products = (data["query"][token].double() @ keys.T).relu()
    return data["weights"][token].double() @ products


@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("width", [16, 64])
def test_the_best_positions_are_selected(
    kernels: Any,
    dtype: torch.dtype,
    heads: int,
    width: int,
    make_step: Callable[..., Any],
    generator: torch.Generator,
) -> None:
    step = make_step([1, 9, 4, 1], [290, 70, 15, 17])
    data = inputs(step, heads, dtype, generator)
    selected = run(kernels, step, data, width)
    assert selected.shape == (step.num_tokens, 1, width)
    for token, sequence, limit in step.rows():
        row = selected[token, 0].tolist()
        count = min(limit, width)
        assert sorted(set(row[:count])) == sorted(row[:count]), "each position once"
        assert row[count:] == [-1] * (width - count), "-1 behind the valid ones"
        assert all(0 <= at < limit for at in row[:count])
        exact = scores(step, data, token, sequence, limit)
        # float32 sums of 128 products and up to 32 heads: errors near 1e-4 of scores near 100.
        worst = exact[row[:count]].min() if count else 0.0
        assert worst >= exact.sort(descending=True).values[:count].min() - 1e-3 if count else True


def test_every_position_is_selected_while_the_context_fits(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([3, 1], [64, 10])
    data = inputs(step, 8, torch.bfloat16, generator)
    selected = run(kernels, step, data, 64)
    for token, _, limit in step.rows():
        assert selected[token, 0, :limit].sort().values.tolist() == list(range(limit))
        assert selected[token, 0, limit:].unique().tolist() in ([-1], [])


def test_ties_go_to_the_lower_position(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([1], [200])
    data = inputs(step, 8, torch.float32, generator)
    data["key"].zero_()
    assert sorted(run(kernels, step, data, 16)[0, 0].tolist()) == list(range(16))


@pytest.mark.parametrize("num_keys", [200, 5000])  # compiled kernels choose in one of two ways
def test_of_scores_that_are_equal_the_first_are_selected(
    kernels: Any, num_keys: int, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([3], [num_keys])
    # Small whole numbers: few different scores, and exact in every order of adding up.
    data = {
        name: value.clamp(-1, 1).round()
        for name, value in inputs(step, 2, torch.float32, generator).items()
    }
    selected = run(kernels, step, data, 70)
    for token, sequence, limit in step.rows():
        exact = scores(step, data, token, sequence, limit)
        best = exact.sort(descending=True, stable=True).indices[:70]
        assert 1 < (exact[best] == exact[best[-1]]).sum() < (exact == exact[best[-1]]).sum()
        assert selected[token, 0].sort().values.tolist() == best.sort().values.tolist()


def test_rows_without_keys_select_nothing(
    kernels: Any, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    step = make_step([1, 4], [100, 0])
    selected = run(kernels, step, inputs(step, 8, torch.float32, generator), 16)
    assert selected[1:].unique().tolist() == [-1]


def test_selection_does_not_depend_on_chunking(
    kernels: Any, dtype: torch.dtype, make_step: Callable[..., Any], generator: torch.Generator
) -> None:
    whole = make_step([100], [300])
    data = inputs(whole, 8, dtype, generator)
    together = run(kernels, whole, data, 32)
    part = make_step([40], [300])
    object.__setattr__(part, "block_table", whole.block_table)
    tail = {name: value[60:] if name != "key" else value for name, value in data.items()}
    assert torch.equal(run(kernels, part, tail, 32).sort(-1).values, together[60:].sort(-1).values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout_query": "BSND"}, "layout_query"),
        ({"layout_key": "TND"}, "layout_key"),
        ({"sparse_mode": 0}, "sparse_mode"),
        ({"return_value": True}, "return_value"),
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
        run(kernels, step, inputs(step, 8, torch.float32, generator), 16, **change)
