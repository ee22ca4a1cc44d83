from collections.abc import Iterable

from services.worker.model.config import ModelConfig
from services.worker.sizing import changes
from services.worker.sizing.changes import Change
from services.worker.sizing.hardware import MIB
from tests.services.worker.sizing.conftest import MakeDeployment


def texts(found: Iterable[Change]) -> list[str]:
    return [change.text for change in found]


def test_settings_that_cost_something_are_proposed_once_they_are_on(
    make_deployment: MakeDeployment,
) -> None:
    full = make_deployment(
        "tp16,ep",
        utilization=0.8,
        max_num_batched_tokens=8192,
        hccl_mib=768,
        num_speculative_tokens=3,
        is_dsa_cp=True,
        capture_sizes=(16,),
    )
    assert texts(changes.settings(full)) == [
        "--gpu-memory-utilization 0.95",
        "--max-num-batched-tokens 2048",
        "HCCL_BUFFSIZE=100",
        "--enforce-eager",
        "--num-speculative-tokens 0",
        "enable_dsa_cp off",
    ]
    bare = make_deployment("tp16,ep", utilization=0.95, is_eager=True, hccl_mib=100)
    assert texts(changes.settings(bare)) == []


def test_a_buffer_is_never_proposed_below_the_window(make_deployment: MakeDeployment) -> None:
    wide = make_deployment("dp8,tp4,ep", capture_sizes=(384,), max_num_seqs=384, hccl_mib=2560)
    (change,) = [c for c in changes.settings(wide) if c.text.startswith("HCCL")]
    assert change.text == f"HCCL_BUFFSIZE={change.deployment.hccl_mib}"
    assert 600 < change.deployment.hccl_mib < 700


def test_caches_in_eight_bits_are_proposed_singly_and_together(
    make_deployment: MakeDeployment,
) -> None:
    both = "enable_sparse_sfa_c8 and enable_sparse_li_c8"
    singles = ["enable_sparse_sfa_c8", "enable_sparse_li_c8"]
    assert texts(changes.caches(make_deployment("tp8"))) == [*singles, both]
    assert texts(changes.caches(make_deployment("tp8", li=True))) == singles[:1]
    assert texts(changes.caches(make_deployment("tp8", sfa=True, li=True))) == []


def test_latents_are_divided_over_all_ranks_of_a_stage(make_deployment: MakeDeployment) -> None:
    found = texts(changes.contexts(make_deployment("tp8")))
    assert found == ["--topology tp8,dcp8 (planned, not served yet)"]
    assert texts(changes.contexts(make_deployment("tp8,dcp8"))) == []
    assert texts(changes.contexts(make_deployment("tp1"))) == []


def test_the_same_devices_can_be_divided_otherwise(make_deployment: MakeDeployment) -> None:
    assert texts(changes.layouts(make_deployment("dp2,tp8,ep"))) == ["--topology tp16,ep"]
    assert texts(changes.layouts(make_deployment("dp2,tp8,dcp8,ep"))) == [
        "--topology tp16,dcp16,ep"
    ]
    # Tensor ranks stay within a node.
    assert texts(changes.layouts(make_deployment("dp2,tp8,ep", hardware="a2"))) == []
    assert texts(changes.layouts(make_deployment("tp16"))) == ["--enable-expert-parallel"]


def test_only_lighter_weights_are_proposed(make_deployment: MakeDeployment) -> None:
    assert texts(changes.weights(make_deployment("tp8", "bf16"))) == [
        "w8a8c8 weights in place of bf16",
        "w4a8c8 weights in place of bf16",
    ]
    assert len(texts(changes.weights(make_deployment("tp8", "w8a8")))) == 1
    assert texts(changes.weights(make_deployment("tp8", "w4a8c8"))) == []


def test_more_devices_are_counted_in_nodes(make_deployment: MakeDeployment) -> None:
    found = texts(changes.nodes(make_deployment("dp2,tp8,ep")))
    assert found[0] == "--topology dp4,tp8,ep on 2 nodes"
    assert "--topology dp2,tp16,ep on 2 nodes" in found
    assert found[-1] == "--topology dp16,tp8,ep on 8 nodes"
    a2 = texts(changes.nodes(make_deployment("tp8", hardware="a2")))
    assert not a2, "a stage has all devices of its node, and replicas alone spread no experts"


def test_a_model_that_cannot_be_divided_further_is_not(
    make_deployment: MakeDeployment, nano: ModelConfig
) -> None:
    small = make_deployment("tp4", "bf16", config=nano, max_model_len=8192)
    # Four heads.
    assert texts(changes.nodes(small)) == []


def test_a_cpu_is_offered_nothing_that_needs_devices(
    make_deployment: MakeDeployment, nano: ModelConfig
) -> None:
    fields = {"config": nano, "max_model_len": 8192, "kv_cache_bytes": MIB}
    host = make_deployment("tp1", "bf16", "cpu", **fields)
    for kind in (
        changes.settings,
        changes.contexts,
        changes.layouts,
        changes.weights,
        changes.nodes,
    ):
        assert texts(kind(host)) == []


def test_nodes_are_rounded_up() -> None:
    assert [changes.num_nodes(world, 16) for world in (1, 16, 17, 32)] == [1, 1, 2, 2]
