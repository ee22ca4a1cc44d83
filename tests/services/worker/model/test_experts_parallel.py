"""The layer around the exchanges."""

from dataclasses import replace

import torch

from services.worker.model.experts import MixtureOfExperts
from services.worker.model.experts_parallel import ExpertParallelMixture
from services.worker.model.layer import Dense, make_block
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import Stream
from tests.services.worker.model.exchanges import fill_block, step_of


def test_a_layer_has_the_block_of_its_kind_and_place(spec: ModelSpec) -> None:
    spread = replace(spec, placement=Placement(ep_size=2))
    assert isinstance(make_block(spec, 0, "mlp."), Dense)
    assert isinstance(make_block(spread, 0, "mlp."), Dense)
    assert isinstance(make_block(spec, 1, "mlp."), MixtureOfExperts)
    assert isinstance(make_block(spread, 1, "mlp."), ExpertParallelMixture)


def test_without_others_a_rank_gives_its_own_experts_share(spec: ModelSpec) -> None:
    """As the shapes of a rank are tried: nobody to exchange with, and nothing known of a tick."""
    shares = []
    x = torch.randn(5, spec.config.hidden_size, generator=torch.Generator().manual_seed(1))
    step = step_of(Stream.alone(5))
    for rank in range(2):
        placed = replace(spec, placement=Placement(ep_size=2, ep_rank=rank))
        block = ExpertParallelMixture(placed, "mlp.")
        fill_block(block)
        shares.append(block(x, step) - block.shared_experts(x))
    whole = MixtureOfExperts(spec, "mlp.")
    fill_block(whole)
    expected = whole(x, step) - whole.shared_experts(x)
    torch.testing.assert_close(shares[0] + shares[1], expected, rtol=1e-5, atol=1e-5)


def test_the_block_takes_every_tensor_of_its_experts_and_no_other(spec: ModelSpec) -> None:
    placed = replace(spec, placement=Placement(ep_size=2, ep_rank=1))
    names = {slot.name for slot in ExpertParallelMixture(placed, "mlp.").slots()}
    experts = {name.split(".")[2] for name in names if ".experts." in f".{name}"}
    assert experts == {"4", "5", "6", "7"}
    whole = {slot.name for slot in MixtureOfExperts(spec, "mlp.").slots()}
    assert {name for name in whole - names} == {
        f"mlp.experts.{expert}.{matrix}_proj.weight"
        for expert in range(4)
        for matrix in ("gate", "up", "down")
    }
