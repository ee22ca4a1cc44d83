import pytest

from services.launcher.options.deployment import Deployment
from tests.services.launcher.options.cases import (
    DENSE,
    MULTI,
    PREFILL,
    STORE,
    deployment,
    drafts,
    extra,
    graphs,
    join,
    transfer,
)


@pytest.mark.parametrize(
    ("text", "path", "shown"),
    [
        ("-tp 8", "tensor_parallel_size", "--tensor-parallel-size 8"),
        ("", "tensor_parallel_size", "--tensor-parallel-size (1, the default)"),
        ("", "seed", "--seed (not given)"),
        ("--headless", "headless", "--headless"),
        ("--no-enforce-eager", "enforce_eager", "--no-enforce-eager"),
        ("", "enforce_eager", "--enforce-eager (not given)"),
        (drafts(3), "speculative_config", "--speculative-config"),
        (
            drafts(3),
            "speculative_config.num_speculative_tokens",
            "--speculative-config num_speculative_tokens=3",
        ),
        (
            "",
            "speculative_config.num_speculative_tokens",
            "--speculative-config num_speculative_tokens (not given)",
        ),
        (
            graphs(sizes=[4]),
            "compilation_config.cudagraph_capture_sizes",
            "--compilation-config cudagraph_capture_sizes=[4]",
        ),
        (
            extra(enable_dsa_cp=False),
            "additional_config.enable_dsa_cp",
            "--additional-config enable_dsa_cp=false",
        ),
        ("--max-num-seqs 1k", "settings.max_num_seqs", "--max-num-seqs 1000"),
        ("", "settings.max_num_seqs", "--max-num-seqs (not given)"),
        ("HCCL_BUFFSIZE=200", "environment.HCCL_BUFFSIZE", "HCCL_BUFFSIZE=200"),
        ("", "environment.HCCL_BUFFSIZE", "HCCL_BUFFSIZE (not given)"),
        (
            "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
            "environment.PYTORCH_NPU_ALLOC_CONF.expandable_segments",
            "PYTORCH_NPU_ALLOC_CONF expandable_segments=true",
        ),
        ("", "model.index_topk", "--model (index_topk 2048)"),
        (
            transfer({**PREFILL, "kv_connector_extra_config": {"prefill": {"tp_size": 8}}}),
            "transfer.prefill.tp_size",
            "--kv-transfer-config prefill.tp_size=8",
        ),
        ("VLLM_ASCEND_ENABLE_NZ=2", "additional_config.weight_nz_mode", "VLLM_ASCEND_ENABLE_NZ=2"),
    ],
)
def test_options_are_shown_as_they_were_written(text: str, path: str, shown: str) -> None:
    assert deployment(text).shown(path) == shown


def test_what_was_named_and_what_was_asked_differ() -> None:
    asked = deployment(join("-tp 1 -pp 2", extra(enable_dsa_cp=False)))
    assert asked.is_given("tensor_parallel_size")
    assert not asked.is_asked("tensor_parallel_size")
    assert asked.is_asked("pipeline_parallel_size")
    assert not asked.is_given("data_parallel_size")
    assert asked.is_given("additional_config.enable_dsa_cp")
    assert not asked.is_asked("additional_config.enable_dsa_cp")
    assert not asked.is_given("speculative_config.method")


def test_a_value_can_be_put_in_place_of_another() -> None:
    asked = deployment(join(graphs(), extra(enable_mlapo=True, enable_dsa_cp=True)))
    changed = asked.with_value("additional_config.enable_mlapo", False)
    changed = changed.with_value("compilation_config.cudagraph_mode", "NONE")
    assert not changed.flags.additional_config.enable_mlapo
    assert changed.flags.additional_config.enable_dsa_cp
    assert not changed.asks_for_graphs
    assert asked.asks_for_graphs
    assert asked.flags.additional_config.enable_mlapo


def test_the_worlds_of_the_guide_have_their_sizes() -> None:
    mixed = deployment("-dp 2 -tp 8 -ep")
    assert (mixed.replica_size, mixed.ep_size) == (8, 16)
    prefill = deployment("-pp 2 -tp 16 -ep")
    assert (prefill.replica_size, prefill.ep_size) == (32, 16)
    assert deployment("-dp 2 -tp 8").ep_size == 1


@pytest.mark.parametrize(
    ("text", "splits"),
    [
        ("-tp 8", False),
        ("-tp 8 -dp 2", False),
        ("-tp 8 -ep", False),
        ("-tp 8 -dp 2 -ep", True),
        ("-dp 2 -ep", False),
        (join("-tp 8", extra(enable_dsa_cp=True)), True),
        (extra(enable_dsa_cp=True), False),
        (join("-tp 8", extra(enable_flashcomm1=True)), True),
        (join("-tp 8 -ep", extra(enable_shared_expert_dp=True)), True),
    ],
)
def test_tokens_are_shared_by_ranks_where_upstream_does(text: str, splits: bool) -> None:
    assert deployment(text).splits_tokens is splits


def test_a_checkpoint_that_cannot_be_read_is_neither_sparse_nor_dense() -> None:
    assert not Deployment().is_sparse
    assert not Deployment().is_dense
    assert deployment("").is_sparse
    assert deployment("", DENSE).is_dense


def test_sides_and_stores_are_found_among_the_children() -> None:
    mooncake = {**PREFILL, "kv_connector_extra_config": {"decode": {"tp_size": 4}}}
    tree = {**MULTI, "kv_connector_extra_config": {"connectors": [mooncake, STORE]}}
    found = deployment(transfer(tree)).transfer
    assert found.decode.tp_size == 4
    assert found.prefill.tp_size is None
    assert [store.kv_connector for store in found.stores] == ["AscendStoreConnector"]
    assert not deployment("").transfer.stores
