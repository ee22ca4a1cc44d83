"""Where a rank stands: its layers, heads and experts, and what cannot be cut."""

from dataclasses import replace

import pytest

from services.worker.model.config import ModelConfig
from services.worker.model.placement import WHOLE, Placement
from shared.errors import ConfigError


def test_a_model_on_one_device_is_whole(config: ModelConfig) -> None:
    WHOLE.check(config)
    assert list(WHOLE.layers(config)) == [0, 1, 2, 3]
    assert WHOLE.is_first_stage()
    assert WHOLE.is_last_stage(config)
    assert WHOLE.head_share(4) == WHOLE.expert_share(4) == slice(0, 4)
    assert list(WHOLE.experts(8)) == list(range(8))


def test_stages_hold_whole_layers(config: ModelConfig) -> None:
    first, last = Placement(last_layer=3), Placement(first_layer=3)
    assert (list(first.layers(config)), list(last.layers(config))) == ([0, 1, 2], [3])
    assert (first.is_first_stage(), first.is_last_stage(config)) == (True, False)
    assert (last.is_first_stage(), last.is_last_stage(config)) == (False, True)


@pytest.mark.parametrize(("count", "size"), [(256, 16), (8, 3), (7, 7)])
def test_experts_are_runs_that_cover_all_of_them(count: int, size: int) -> None:
    ranks = [Placement(ep_size=size, ep_rank=rank).experts(count) for rank in range(size)]
    assert [expert for run in ranks for expert in run] == list(range(count))
    lengths = [len(run) for run in ranks]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_with_expert_parallelism_experts_are_whole_else_cut() -> None:
    cut, whole = Placement(tp_size=2, tp_rank=1), Placement(tp_size=2, ep_size=2)
    assert cut.expert_share(32) == slice(16, 32)
    assert whole.expert_share(32) == slice(0, 32)


def test_heads_are_cut_unless_tokens_are() -> None:
    assert Placement(tp_size=4, tp_rank=2).head_share(8) == slice(4, 6)
    assert Placement(tp_size=4, tp_rank=2, is_dsa_cp=True).head_share(8) == slice(0, 8)


def test_tokens_that_are_cut_are_shared_evenly_where_steps_are_captured() -> None:
    assert Placement(tp_size=4).token_multiple == 1
    assert Placement(tp_size=4, is_dsa_cp=True).token_multiple == 4
    assert Placement(tp_size=4, is_flashcomm=True).token_multiple == 4


def test_shared_experts_are_whole_where_cut_tokens_stay(config: ModelConfig) -> None:
    assert not Placement(tp_size=4, is_flashcomm=True).has_whole_shared_experts
    assert not Placement(tp_size=4, ep_size=4).has_whole_shared_experts
    spread = Placement(tp_size=4, ep_size=4, is_flashcomm=True)
    assert spread.has_whole_shared_experts
    odd = replace(config, moe_intermediate_size=30)
    spread.check(odd)
    with pytest.raises(ConfigError, match="shared expert width=30 cannot be cut over tp_size=4"):
        replace(spread, is_flashcomm=False).check(odd)


def test_the_last_ranks_of_an_uneven_cut_get_less() -> None:
    ranks = [Placement(tp_size=4, tp_rank=rank) for rank in range(4)]
    assert [rank.share(10) for rank in ranks] == [
        slice(0, 3),
        slice(3, 6),
        slice(6, 9),
        slice(9, 10),
    ]
    assert {rank.largest_share(10) for rank in ranks} == {3}
    assert ranks[3].share(3) == slice(3, 3)


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (Placement(tp_size=8), "num_attention_heads=4 cannot be cut over tp_size=8"),
        (Placement(ep_size=16), "ep_size=16 is above n_routed_experts=8"),
        (Placement(first_layer=3, last_layer=3), "layers 3 to 3 are not a stage"),
        (Placement(first_layer=1, last_layer=9), "layers 1 to 9 are not a stage"),
    ],
)
def test_what_cannot_be_cut_is_named(
    config: ModelConfig, placement: Placement, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        placement.check(config)


def test_widths_are_checked_where_they_are_cut(config: ModelConfig) -> None:
    odd = replace(config, moe_intermediate_size=31, n_shared_experts=2)
    with pytest.raises(ConfigError, match="moe_intermediate_size=31 cannot be cut"):
        Placement(tp_size=2).check(odd)
    Placement(tp_size=2, ep_size=2).check(odd)


@pytest.mark.parametrize("values", [{"tp_rank": 1}, {"ep_size": 2, "ep_rank": 2}, {"tp_rank": -1}])
def test_a_rank_is_within_its_group(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be below"):
        Placement(**values)
