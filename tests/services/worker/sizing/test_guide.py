"""Deployments that run in reality must come out as running, from their own command lines."""

import shlex

import pytest

from services.worker.sizing.changes import num_nodes
from services.worker.sizing.command_line import read_command_line
from services.worker.sizing.plan import Plan, Verdict, make_plan
from services.worker.sizing.request import build_deployment
from services.worker.sizing.settings import PlanSettings
from shared.config import parse
from tests.services.worker.sizing.conftest import MODELS
from tests.services.worker.sizing.guide import GUIDE, Case


def plan_of(case: Case) -> Plan:
    own = ["--model", str(MODELS / "glm-5.2"), "--hardware", case.hardware, "--scheme", case.scheme]
    line = read_command_line([*own, *shlex.split(case.command)])
    return make_plan(build_deployment(parse(PlanSettings, line.flags), case.environment))


@pytest.mark.parametrize("name", GUIDE)
def test_a_published_deployment_holds_its_weights_and_a_longest_sequence(name: str) -> None:
    case = GUIDE[name]
    plan = plan_of(case)
    topology, hardware = plan.deployment.topology, plan.deployment.hardware
    assert topology.world_size == case.world
    assert num_nodes(topology.world_size, hardware.devices_per_node) == case.nodes
    assert plan.verdict in {Verdict.FITS, Verdict.STARTS}, plan
    assert plan.num_full_seqs >= 1
    assert all(rank.used < (rank.limit or 0) for rank in plan.ranks)


def test_the_documented_table_is_what_a_plan_says() -> None:
    documented = (MODELS.parent / "docs" / "sizing.md").read_text(encoding="utf-8").splitlines()
    for name, case in GUIDE.items():
        plan = plan_of(case)
        length = plan.deployment.max_model_len
        start = f"| {name} | {case.scheme} | {plan.deployment.topology} | {length:,} | "
        (row,) = [line for line in documented if line.startswith(start)]
        tokens = int(row.removeprefix(start).removesuffix(" |").replace(",", ""))
        # A small tensor more or less in the model is no reason to write the page anew.
        assert tokens == pytest.approx(plan.num_tokens, rel=0.01), name


def test_a_stage_of_41_layers_has_fewer_blocks_than_one_of_37_and_decides() -> None:
    plan = plan_of(GUIDE["prefill on A3"])
    assert [rank.cache.per_token for rank in plan.ranks] == [48_792, 45_076]
    first, last = (rank.num_blocks for rank in plan.ranks)
    assert plan.num_blocks == min(first, last)
    assert any("layer 41" in warning for warning in plan.warnings)


def test_the_guides_weights_take_the_nodes_that_it_says() -> None:
    """BF16 takes two A3 nodes or four of A2; w8a8 half of that, and w4a8 no more."""
    own = ["--model", str(MODELS / "glm-5.2"), "--max-model-len", "8192", "--enforce-eager"]
    own += ["--gpu-memory-utilization", "0.95"]

    def starts(scheme: str, hardware: str, topology: str) -> bool:
        flags = ["--scheme", scheme, "--hardware", hardware, "--topology", topology]
        settings = parse(PlanSettings, [*own, *flags])
        return make_plan(build_deployment(settings, {})).num_full_seqs > 0

    for hardware in ("a2", "a3"):
        assert not starts("bf16", hardware, "dp2,tp8,ep")
        assert starts("bf16", hardware, "dp4,tp8,ep")
        assert starts("w8a8", hardware, "dp2,tp8,ep")
        assert starts("w4a8c8", hardware, "dp2,tp8,ep")
        assert not starts("w8a8", hardware, "tp8,ep")
