"""Float projections."""

import torch
from torch.nn import functional

from services.worker.model.linear import Linear
from services.worker.model.placement import WHOLE, Placement
from services.worker.model.shards import Cut, Shards
from services.worker.ops import nz

CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_projection_multiplies_by_the_transpose_of_the_checkpoint_matrix() -> None:
    linear = Linear(Shards.cut(WHOLE, "", {"w": 3}, 8, Cut.WHOLE), torch.float32, CPU)
    matrix = random(3, 8, seed=1)
    (slot,) = linear.slots()
    slot.store(matrix)
    x = random(5, 8, seed=2)
    torch.testing.assert_close(linear(x), functional.linear(x, matrix), atol=1e-5, rtol=1e-5)


def test_matrices_of_one_input_lie_side_by_side_in_order() -> None:
    shards = Shards.cut(WHOLE, "mlp.", {"gate_proj": 3, "up_proj": 2}, 2, Cut.WHOLE)
    linear = Linear(shards, torch.float32, CPU)
    gate, up = linear.slots()
    assert (gate.name, gate.shape) == ("mlp.gate_proj.weight", (3, 2))
    assert (up.name, up.shape) == ("mlp.up_proj.weight", (2, 2))
    gate.store(torch.ones(3, 2))
    up.store(torch.full((2, 2), 2.0))
    assert torch.equal(linear.weight, torch.cat((torch.ones(3, 2), torch.full((2, 2), 2.0))).T)


def test_loading_ends_with_the_weight_packed_and_the_same_results() -> None:
    linear = Linear(Shards.cut(WHOLE, "", {"w": 40}, 8, Cut.WHOLE), torch.float32, CPU)
    (slot,) = linear.slots()
    slot.store(random(40, 8, seed=1))
    x = random(5, 8, seed=2)
    before, plain = linear(x), linear.weight
    linear.finish_loading()
    assert nz.is_nz(linear.weight)
    assert torch.equal(nz.plain(linear.weight), plain)
    assert torch.equal(linear(x), before)


def cut_results(cut: Cut, x: torch.Tensor, matrix: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    results = []
    for rank in range(ranks):
        placement = Placement(tp_size=ranks, tp_rank=rank)
        shards = Shards.cut(placement, "", {"w": matrix.shape[0]}, matrix.shape[1], cut)
        linear = Linear(shards, torch.float32, CPU)
        (slot,) = linear.slots()
        window = slot.window or ...
        slot.store(matrix[window])
        part = x[:, window[1]] if cut is Cut.INPUTS and slot.window else x
        results.append(linear(part))
    return results


def test_outputs_of_the_ranks_side_by_side_are_the_whole_result() -> None:
    x, matrix = random(5, 8, seed=1), random(12, 8, seed=2)
    joined = torch.cat(cut_results(Cut.OUTPUTS, x, matrix, 4), 1)
    torch.testing.assert_close(joined, x @ matrix.T, atol=1e-5, rtol=1e-5)


def test_results_of_ranks_that_share_the_inputs_add_up() -> None:
    x, matrix = random(5, 8, seed=1), random(12, 8, seed=2)
    total = torch.stack(cut_results(Cut.INPUTS, x, matrix, 4)).sum(0)
    torch.testing.assert_close(total, x @ matrix.T, atol=1e-5, rtol=1e-5)


def test_outputs_that_do_not_divide_end_in_zeros() -> None:
    x, matrix = random(5, 8, seed=1), random(10, 8, seed=2)
    joined = torch.cat(cut_results(Cut.OUTPUTS, x, matrix, 4), 1)
    assert joined.shape == (5, 12)
    torch.testing.assert_close(joined[:, :10], x @ matrix.T, atol=1e-5, rtol=1e-5)
    assert not joined[:, 10:].any()
