import time
from dataclasses import replace

import pytest

from services.worker.capacity import count_blocks, min_blocks
from services.worker.model.config import ModelConfig
from services.worker.sizing.hardware import GIB, MIB
from services.worker.sizing.plan import Plan, RankPlan, Verdict, make_plan
from services.worker.sizing.weights import WeightClass
from shared.errors import ConfigError
from tests.services.worker.sizing.conftest import MakeDeployment


def names(rank: RankPlan) -> list[str]:
    return [item.name for item in rank.runtime]


def test_memory_adds_up_to_the_share_of_the_device(make_deployment: MakeDeployment) -> None:
    plan = make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", utilization=0.92))
    (rank,) = plan.ranks
    assert (rank.name, rank.count) == ("every rank", 16)
    assert rank.limit == int(int(61.27 * GIB) * 0.92)
    taken = rank.weights.total + sum(item.num_bytes for item in rank.runtime)
    assert taken + rank.budget == rank.limit
    assert rank.num_blocks == rank.budget // rank.cache.per_block
    assert plan.num_tokens == (rank.num_blocks - 1) * 128


def test_tables_of_positions_have_the_served_length(make_deployment: MakeDeployment) -> None:
    for length in (1_048_576, 131_072):
        (rank,) = make_plan(make_deployment("tp16,ep", max_model_len=length)).ranks
        assert rank.weights[WeightClass.ROTARY] == 2 * length * 64 * 2


def test_everything_that_runs_beside_the_weights_is_counted(
    make_deployment: MakeDeployment,
) -> None:
    mixed = {"max_num_batched_tokens": 8192, "num_speculative_tokens": 3}
    (rank,) = make_plan(make_deployment("dp2,tp8,dcp8,ep", **mixed)).ranks
    assert names(rank) == [
        "largest step",
        "top-k indices",
        "gathered latent rows",
        "graph pools",
        "HCCL tp+dcp",
        "HCCL dp",
        "HCCL ep",
        "MC2 window",
        "kernel workspace",
        "CANN runtime",
        "driver",
    ]
    estimates = {item.name for item in rank.runtime if item.is_estimate}
    assert estimates == {
        "largest step",
        "graph pools",
        "kernel workspace",
        "CANN runtime",
        "driver",
    }
    eager = make_plan(make_deployment("pp2,tp8", is_eager=True)).ranks[0]
    assert "graph pools" not in names(eager)
    assert "next stage's input" in names(eager)


def test_layers_and_sampling_take_turns_in_the_largest_step(
    make_deployment: MakeDeployment,
) -> None:
    (rank,) = make_plan(make_deployment("tp16,ep", max_num_batched_tokens=8192)).ranks
    step = rank.runtime[0]
    assert list(step.parts) == ["layers, 8192 tokens", "logits and sampling, 256 rows"]
    assert step.num_bytes == max(step.parts.values())


def test_each_stage_is_a_kind_of_rank_and_the_fuller_decides(
    make_deployment: MakeDeployment,
) -> None:
    plan = make_plan(make_deployment("pp2[41/37],tp16,ep", li=True, num_speculative_tokens=1))
    assert [(rank.name, rank.count) for rank in plan.ranks] == [("stage 0", 16), ("stage 1", 16)]
    assert plan.num_blocks == min(rank.num_blocks for rank in plan.ranks)
    assert plan.ranks[0].num_blocks != plan.ranks[1].num_blocks


def test_ranks_with_one_more_expert_are_a_kind_of_their_own(
    make_deployment: MakeDeployment,
) -> None:
    plan = make_plan(make_deployment("dp3,tp16,ep"))
    assert [(rank.name, rank.count) for rank in plan.ranks] == [
        ("every rank, 6 experts", 16),
        ("every rank, 5 experts", 32),
    ]
    assert plan.ranks[0].weights.total > plan.ranks[1].weights.total


@pytest.mark.parametrize(
    ("scheme", "length", "seqs", "verdict"),
    [
        ("w4a8c8", 8192, 16, Verdict.FITS),
        ("w4a8c8", 131072, 16, Verdict.STARTS),
        ("w4a8c8", 1048576, 1, Verdict.TOO_SMALL),
        ("bf16", 8192, 1, Verdict.TOO_HEAVY),
    ],
)
def test_the_verdict_says_how_far_it_gets(
    make_deployment: MakeDeployment, scheme: str, length: int, seqs: int, verdict: Verdict
) -> None:
    deployment = make_deployment(
        "dp2,tp8,ep", scheme, max_model_len=length, max_num_seqs=seqs, num_full_seqs=seqs
    )
    plan = make_plan(deployment)
    assert plan.verdict is verdict
    assert plan.fits == (verdict is Verdict.FITS)


def test_sequences_are_counted_as_the_worker_counts_their_blocks(
    make_deployment: MakeDeployment,
) -> None:
    plan = make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", max_model_len=100_000))
    (rank,) = plan.ranks
    assert count_blocks(rank.budget, rank.cache.per_block, 100_000) == plan.num_blocks
    one = replace(plan.deployment, kv_cache_bytes=min_blocks(100_000) * rank.cache.per_block)
    assert make_plan(one).num_full_seqs == 1
    less = replace(plan.deployment, kv_cache_bytes=one.kv_cache_bytes - 1)
    assert make_plan(less).num_full_seqs == 0


def test_on_a_cpu_the_budget_is_the_setting_and_nothing_else_counts(
    make_deployment: MakeDeployment, nano: ModelConfig
) -> None:
    deployment = make_deployment(
        "tp1", "bf16", "cpu", config=nano, max_model_len=8192, kv_cache_bytes=512 * MIB
    )
    (rank,) = make_plan(deployment).ranks
    assert (rank.runtime, rank.limit, rank.budget) == ((), None, 512 * MIB)


def test_a_budget_set_by_hand_may_not_exceed_the_device(make_deployment: MakeDeployment) -> None:
    plan = make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", kv_cache_bytes=10 * GIB))
    assert plan.ranks[0].budget == 10 * GIB
    too_much = make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", kv_cache_bytes=60 * GIB))
    assert too_much.ranks[0].budget + too_much.ranks[0].used == int(61.27 * GIB)


def test_a_window_without_room_is_a_warning(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment("dp16,tp2,ep", max_num_seqs=192, hccl_mib=256)
    (warning,) = make_plan(deployment).warnings
    # 32 ranks of 8 experts, 2 of them in each replica: 3.2 MiB for each token of a rank, each way.
    assert warning.startswith(
        "HCCL_BUFFSIZE=256 has room for the fused exchange of 78 tokens between experts, of 192: "
        "larger steps go by alltoall; 621 has room for all"
    )
    assert not make_plan(replace(deployment, hccl_mib=1000)).warnings


def test_a_layout_that_the_model_cannot_have_is_refused(make_deployment: MakeDeployment) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads=64 cannot be cut over tp_size=3"):
        make_plan(make_deployment("tp3"))
    with pytest.raises(ConfigError, match="ep_size=512 is above n_routed_experts=256"):
        make_plan(make_deployment("dp64,tp8,ep"))


def test_a_plan_takes_a_fraction_of_a_second(make_deployment: MakeDeployment) -> None:
    def sized() -> Plan:
        return make_plan(make_deployment("pp2[41/37],tp16,ep", "w8a8c8", num_speculative_tokens=1))

    sized()
    started = time.process_time()
    sized()
    # 0.1 s; all layouts of the guide must take less than ten.
    assert time.process_time() - started < 2
