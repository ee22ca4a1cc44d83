"""Suggestions are plans: each is made again here from the flags that it names."""

from dataclasses import replace
from typing import Any

import pytest

from services.worker.model.config import ModelConfig
from services.worker.sizing.advice import Suggestion, advise
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import MIB
from services.worker.sizing.plan import Verdict, make_plan
from tests.services.worker.sizing.conftest import MakeDeployment


def find(suggestions: tuple[Suggestion, ...], start: str) -> Suggestion:
    return next(found for found in suggestions if found.texts[0].startswith(start))


def short_of(make_deployment: MakeDeployment, **fields: Any) -> Deployment:
    fields = {"max_model_len": 135_000, "max_num_seqs": 12, "num_full_seqs": 12, **fields}
    return make_deployment("dp2,tp8,ep", "w4a8c8", **fields)


def test_a_plan_that_fits_is_only_told_of_more_room(make_deployment: MakeDeployment) -> None:
    plan = make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", max_model_len=8192))
    advice = advise(plan)
    assert plan.fits
    assert not advice.enough
    assert advice.together is None
    tokens = [found.plan.num_tokens for found in advice.gains]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-1] > plan.num_tokens
    assert len(tokens) <= 4


def test_everything_said_to_be_enough_is(make_deployment: MakeDeployment) -> None:
    plan = make_plan(short_of(make_deployment, max_num_seqs=3, num_full_seqs=3))
    assert plan.verdict is Verdict.STARTS
    advice = advise(plan)
    assert len(advice.enough) >= 4
    for found in advice.enough:
        assert make_plan(found.plan.deployment).verdict is Verdict.FITS, found.texts


def test_fewer_sequences_are_as_many_as_fit(make_deployment: MakeDeployment) -> None:
    deployment = short_of(make_deployment, max_model_len=66_000, max_num_seqs=16, num_full_seqs=16)
    found = find(advise(make_plan(deployment)).enough, "--max-num-seqs")
    count = int(found.texts[0].split()[1])
    for asked, fits in ((count, True), (count + 1, False)):
        changed = replace(deployment, max_num_seqs=asked, num_full_seqs=asked)
        assert make_plan(changed).fits is fits


def test_with_a_demand_of_its_own_the_demand_is_lowered(make_deployment: MakeDeployment) -> None:
    deployment = short_of(make_deployment, max_num_seqs=64, num_full_seqs=5)
    found = find(advise(make_plan(deployment)).enough, "--at-least")
    assert found.plan.deployment.max_num_seqs == 64
    assert found.plan.fits


def test_a_shorter_limit_of_length_is_the_longest_that_fits(
    make_deployment: MakeDeployment,
) -> None:
    deployment = short_of(make_deployment)
    found = find(advise(make_plan(deployment)).enough, "--max-model-len")
    length = int(found.texts[0].split()[1])
    assert make_plan(replace(deployment, max_model_len=length)).fits
    # A block of 128 tokens more for each of the sequences is too much.
    assert not make_plan(replace(deployment, max_model_len=length + 128)).fits


def test_a_divided_cache_makes_room_for_a_million_tokens(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment(
        "tp16,ep", "w4a8c8", sfa=True, li=True, max_model_len=1_048_576, utilization=0.8
    )
    plan = make_plan(deployment)
    assert plan.verdict is Verdict.TOO_SMALL
    found = find(advise(plan).enough, "--topology tp16,dcp16,ep (planned, not served yet)")
    assert found.plan.num_full_seqs >= 1
    assert f"{found.plan.num_full_seqs} sequences of 1,048,576" in found.effect


def test_packed_latents_give_the_factor_of_their_bytes(make_deployment: MakeDeployment) -> None:
    # Far above one block, so that rounding to blocks is below a hundredth.
    plan = make_plan(make_deployment("dp2,tp8,ep", "w4a8c8", max_model_len=8192))
    both = find(advise(plan).gains, "enable_sparse_sfa_c8")
    assert both.plan.num_tokens / plan.num_tokens == pytest.approx(95_232 / 53_898, abs=0.01)
    assert "(1.77x)" in both.effect


def test_lighter_weights_say_what_they_free(make_deployment: MakeDeployment) -> None:
    heavy = make_plan(make_deployment("dp2,tp8,ep", "w8a8c8", max_model_len=131072))
    found = find(advise(heavy).enough, "w4a8c8 weights in place of w8a8c8")
    # 22.6 GB of the experts, less what their scales take: 21 GiB of 1.07 GB each.
    assert "frees 21." in found.effect or "frees 20." in found.effect


def test_where_nothing_suffices_alone_several_changes_do(make_deployment: MakeDeployment) -> None:
    plan = make_plan(make_deployment("dp2,tp8,ep", "bf16", max_model_len=1_048_576))
    assert plan.verdict is Verdict.TOO_HEAVY
    advice = advise(plan)
    assert not advice.enough
    assert advice.together is not None
    assert len(advice.together.texts) > 1
    assert make_plan(advice.together.plan.deployment).fits
    # On the same devices if that can be.
    assert advice.together.plan.deployment.topology.world_size == 16


def test_more_nodes_are_proposed_no_further_than_needed(make_deployment: MakeDeployment) -> None:
    plan = make_plan(make_deployment("dp2,tp8,ep", "bf16", max_model_len=8192, utilization=0.95))
    nodes = [f for f in advise(plan).enough if "nodes" in f.texts[0]]
    assert nodes
    assert all("on 2 nodes" in found.texts[0] for found in nodes)


def test_a_window_without_room_names_the_buffer_it_needs(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment("dp16,tp2,ep", max_num_seqs=192, hccl_mib=256, max_model_len=8192)
    (found,) = advise(make_plan(deployment)).faster
    assert found.texts[0] == f"HCCL_BUFFSIZE={found.plan.deployment.hccl_mib}"
    assert not found.plan.warnings


def test_a_budget_set_by_hand_is_raised_to_what_is_needed(
    make_deployment: MakeDeployment, nano: ModelConfig
) -> None:
    fields = {"config": nano, "max_model_len": 8192, "kv_cache_bytes": 64 * MIB}
    plan = make_plan(
        make_deployment("tp1", "bf16", "cpu", max_num_seqs=3, num_full_seqs=3, **fields)
    )
    found = find(advise(plan).enough, "--kv-cache-memory-bytes")
    size = int(found.texts[0].split()[1])
    assert size == (3 * 64 + 1) * plan.ranks[0].cache.per_block
    assert found.plan.num_full_seqs == 3
