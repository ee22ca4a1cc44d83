"""Logits of models that ranks share, on a script of steps, against those of one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.parallel.topology import Topology
from tests.services.worker.parallel.model_cases import make_script, quantize, run_alone
from tests.services.worker.parallel.ranks import Ranks

C8 = {"sparse_sfa_c8": True, "sparse_li_c8": True}


@pytest.fixture(scope="module")
def checkpoints(
    make_checkpoint: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A float model and its quantized forms, wide enough for halves of int4 experts."""
    plain = make_checkpoint(moe_intermediate_size=64, intermediate_size=128).path
    folder = tmp_path_factory.mktemp("quantized")
    found = {"float": plain}
    for recipe in ("w8a8", "w4a8c8"):
        found[recipe] = folder / recipe
        quantize(plain, found[recipe], recipe)
    return found


@pytest.fixture(scope="module")
def run(ranks: Ranks, checkpoints: dict[str, Path]) -> Callable[..., Any]:
    """Pairs of all logits of a replica's script: of the ranks together, and of one alone."""

    def run(
        weights: str, layout: str, *, idle: list[int] | None = None, **options: Any
    ) -> list[tuple[Tensor, Tensor]]:
        topology = Topology.parse(layout)
        path = str(checkpoints[weights])
        partition = list(topology.layer_partition)
        found = ranks.run(
            topology.world_size,
            "model_cases:run_model",
            path=path,
            topology=layout,
            partition=partition,
            idle=idle or [],
            **options,
        )
        pairs = []
        alone = {name: value for name, value in options.items() if name == "caches"}
        for rank, logits in enumerate(found):
            place = topology.coordinates(rank)
            is_last = place.pp_rank == topology.pipeline_parallel_size - 1
            assert (logits is not None) == is_last
            if logits is not None:
                script = make_script(place.dp_rank, 97, place.dp_rank in (idle or []))
                pairs.append((torch.cat(logits), torch.cat(run_alone(path, script, **alone))))
        return pairs

    return run


FLOAT_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tp2", {}),
    ("tp4", {}),
    ("tp2", {"caches": C8}),
    ("tp2,ep", {}),
    ("tp4,ep", {"method": "alltoall"}),
    ("tp2,ep", {"method": "mc2"}),
    # 8 experts on 3 ranks: 3, 3 and 2.
    ("dp3,ep", {"method": "alltoall"}),
    ("dp3,ep", {}),
    ("dp2,ep", {"idle": [0]}),
    ("dp2,ep", {"idle": [1], "method": "alltoall"}),
    ("dp2,ep", {"idle": [1], "method": "mc2"}),
    ("dp4,ep", {"method": "mc2"}),
    ("dp2,tp2,ep", {}),
    ("dp2,tp2,ep", {"method": "alltoall"}),
    ("tp2,pp2[1/3]", {}),
]

DSA_CP, FLASHCOMM, BOTH = ["dsa_cp"], ["flashcomm"], ["dsa_cp", "flashcomm"]
CUT_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tp2", {"cuts": DSA_CP}),
    # Steps of two tokens: two of four ranks have none.
    ("tp4", {"cuts": DSA_CP}),
    ("tp4", {"cuts": FLASHCOMM}),
    ("tp4", {"cuts": BOTH}),
    ("tp2", {"cuts": BOTH, "caches": C8}),
    ("tp4", {"cuts": DSA_CP, "caches": {"sparse_sfa_c8": True}}),
    ("tp4", {"cuts": DSA_CP, "caches": {"sparse_li_c8": True}}),
    ("tp4,ep", {"cuts": BOTH}),
    ("tp2,ep", {"cuts": DSA_CP, "method": "alltoall"}),
    ("tp2,ep", {"cuts": FLASHCOMM, "method": "mc2"}),
    ("dp2,tp2,ep", {"cuts": BOTH}),
    ("dp2,tp2,ep", {"cuts": FLASHCOMM, "method": "alltoall", "idle": [1]}),
    ("dp2,tp2,ep", {"cuts": BOTH, "method": "mc2", "idle": [0]}),
    # The second stage begins with a layer that attends to what the first one selected.
    ("tp2,pp2[1/3]", {"cuts": DSA_CP}),
    ("tp2,pp2[1/3]", {"cuts": BOTH}),
    ("tp2,pp2[2/2]", {"cuts": FLASHCOMM}),
]


@pytest.mark.parametrize(("layout", "options"), [*FLOAT_LAYOUTS, *CUT_LAYOUTS])
def test_float_logits_differ_by_the_order_of_sums_alone(
    run: Callable[..., Any], layout: str, options: dict[str, Any]
) -> None:
    for ours, theirs in run("float", layout, **options):
        # Sums of 64 to 256 products, 2^-24 of each, in other orders in each of four layers; logits
        # are about 3. Measured: 4e-6. Eight bits make a last bit before a rounding a step of 1/127
        # of a lane after it.
        bound = 1e-2 if "caches" in options else 3e-5
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)
        # The same greedy tokens wherever two are not closer than that.
        best = theirs.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 2 * bound
        assert torch.equal(ours.argmax(1)[is_clear], theirs.argmax(1)[is_clear])
        assert bool(is_clear.float().mean() > 0.9)


@pytest.mark.parametrize("layout", ["pp2[3/1]", "pp2[2/2]", "pp4", "pp3[1/1/2]"])
def test_a_stage_changes_no_bit(run: Callable[..., Any], layout: str) -> None:
    """Stages that begin with layers 1 or 3 attend to what another stage selected."""
    for ours, theirs in run("float", layout):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("weights", ["w8a8", "w4a8c8"])
@pytest.mark.parametrize("method", ["allgather", "alltoall", "mc2"])
def test_quantized_experts_are_the_same_wherever_they_are(
    run: Callable[..., Any], weights: str, method: str
) -> None:
    """Rows are quantized before they travel or after: by themselves, so to the same levels."""
    for ours, theirs in run(weights, "dp2,ep", method=method):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("weights", "layout", "options"),
    [
        ("w8a8", "tp2", {}),
        ("w8a8", "tp2", {"caches": C8}),
        ("w8a8", "tp2,ep", {"method": "alltoall"}),
        ("w4a8c8", "tp2", {}),
        ("w4a8c8", "tp2,ep", {"method": "mc2"}),
        # A bias that every rank adds would be scattered as often; whole shared experts add theirs.
        ("w8a8", "tp2", {"cuts": BOTH, "caches": C8}),
        ("w8a8", "tp2,ep", {"cuts": FLASHCOMM, "method": "alltoall"}),
        ("w4a8c8", "tp2,ep", {"cuts": BOTH}),
    ],
)
def test_cut_rows_that_are_quantized_in_parts_bring_no_more_noise(
    run: Callable[..., Any],
    checkpoints: dict[str, Path],
    weights: str,
    layout: str,
    options: dict[str, Any],
) -> None:
    """A rank finds the scale of its part of a row, which is a finer one than the whole row's.

    So numbers differ, but their distance to the float model may not grow. A bias that every rank
    adds, or a scale of another part, is many times the noise.
    """
    plain = torch.cat(run_alone(str(checkpoints["float"]), make_script(0, 97)))
    for ours, theirs in run(weights, layout, **options):
        noise = (theirs - plain).square().mean().sqrt()
        assert (ours - plain).square().mean().sqrt() < 1.2 * noise
        assert 0.05 < noise < 1.0
