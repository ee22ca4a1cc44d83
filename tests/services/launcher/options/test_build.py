from typing import Any

import pytest

from services.launcher.options.build import Built, build

X = "additional_config"


def built(values: dict[str, Any], **variables: str) -> Built:
    return build(values, variables)


def test_values_become_typed() -> None:
    flags = built(
        {
            "tensor_parallel_size": "8",
            "headless": True,
            "speculative_config": {"num_speculative_tokens": 3, "method": "deepseek_mtp"},
            "kv_transfer_config": {"kv_connector": "MooncakeConnectorV1", "kv_port": "30000"},
            X: {"enable_dsa_cp": True, "eplb_config": {"num_redundant_experts": 16}},
        }
    ).flags
    assert flags.tensor_parallel_size == 8
    assert flags.speculative_config is not None
    assert flags.speculative_config.num_speculative_tokens == 3
    assert flags.kv_transfer_config is not None
    assert flags.kv_transfer_config.kv_port == 30000
    assert flags.additional_config.eplb_config.num_redundant_experts == 16


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tensor_parallel_size": "0"}, "--tensor-parallel-size 0: input should be greater"),
        ({"tensor_parallel_size": "x"}, "--tensor-parallel-size x: "),
        ({"quantization": "awq"}, "--quantization awq: input should be 'ascend' or 'none'"),
        (
            {"speculative_config": {"method": "mtp"}},
            "--speculative-config: num_speculative_tokens is required",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": True}},
            "--speculative-config: num_speculative_tokens true: must be a number",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 1, "methd": "mtp"}},
            "--speculative-config: methd mtp: no key that is read here; did you mean method?",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "SOME"}},
            "--compilation-config: cudagraph_mode SOME: input should be 'NONE'",
        ),
        (
            {"compilation_config": {"cudagraph_capture_sizes": [4, 0]}},
            "--compilation-config: cudagraph_capture_sizes[1] 0: ",
        ),
        ({X: {"enable_fused_mc2": 2}}, "--additional-config: enable_fused_mc2 2: "),
        ({X: {"weight_nz_mode": 3}}, "--additional-config: weight_nz_mode 3: "),
        ({X: {"mega_moe_max_tokens": 0}}, "--additional-config: mega_moe_max_tokens 0: "),
        ({X: {"enable_dsa_cp": "perhaps"}}, "--additional-config: enable_dsa_cp perhaps: "),
        ({X: {"eplb_config": 1}}, "--additional-config: eplb_config 1: "),
        (
            {X: {"eplb_config": {"eplb_policy_type": 4}}},
            "--additional-config: eplb_config.eplb_policy_type 4: ",
        ),
        ({"kv_transfer_config": {"kv_role": "x"}}, "--kv-transfer-config: kv_role x: "),
        (
            {
                "kv_transfer_config": {
                    "kv_connector_extra_config": {"connectors": [{"kv_connector": "Nixl"}]}
                }
            },
            "--kv-transfer-config: kv_connector_extra_config.connectors[0].kv_connector Nixl: ",
        ),
        ({"profiler_config": {"profiler": "x"}}, "--profiler-config: profiler x: "),
    ],
)
def test_a_value_without_sense_names_flag_key_value_and_bound(
    values: dict[str, Any], problem: str
) -> None:
    found = built(values)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(problem)


def test_all_mistakes_are_told_and_the_rest_is_kept() -> None:
    found = built(
        {
            "tensor_parallel_size": "0",
            "seed": "7",
            X: {"weight_nz_mode": 9, "enable_fused_mc2": "x", "enable_dsa_cp": True},
        }
    )
    assert len(found.problems) == 3
    assert found.flags.seed == 7
    assert found.flags.tensor_parallel_size == 1
    assert found.flags.additional_config.enable_dsa_cp


def test_unknown_keys_are_told_with_what_they_look_like() -> None:
    lines = built(
        {
            X: {"enable_dsa_pc": True, "eplb_config": {"dynamic_eplbs": True}},
            "kv_transfer_config": {"kv_connector_extra_config": {"prefill": {"tpsize": 1}}},
        }
    ).lines
    assert sorted(lines) == [
        "--additional-config enable_dsa_pc: unknown key, ignored; did you mean enable_dsa_cp?",
        "--additional-config eplb_config.dynamic_eplbs: unknown key, ignored; "
        "did you mean dynamic_eplb?",
        "--kv-transfer-config kv_connector_extra_config.prefill.tpsize: unknown key, ignored; "
        "did you mean tp_size?",
    ]


def test_a_text_given_for_a_switch_is_read_and_told() -> None:
    found = built({X: {"enable_reduce_sample": "True", "enable_dsa_cp": "False"}})
    assert found.flags.additional_config.enable_reduce_sample
    assert not found.flags.additional_config.enable_dsa_cp
    assert sorted(found.lines) == [
        '--additional-config enable_dsa_cp: the text "False" is read as false',
        '--additional-config enable_reduce_sample: the text "True" is read as true',
    ]


def test_the_newer_place_of_a_scheduler_key_wins() -> None:
    found = built(
        {
            X: {
                "enable_balance_scheduling": True,
                "scheduler_config": {"enable_balance_scheduling": False},
            }
        }
    )
    assert not found.flags.additional_config.enable_balance_scheduling
    assert found.lines == (
        "--additional-config enable_balance_scheduling=true: no effect: "
        "scheduler_config.enable_balance_scheduling=false wins",
    )
    found = built({X: {"scheduler_config": {"recompute_scheduler_enable": True}}})
    assert found.flags.additional_config.recompute_scheduler_enable
    assert found.origins[f"{X}.recompute_scheduler_enable"] == (
        "--additional-config scheduler_config.recompute_scheduler_enable"
    )


def test_variables_of_older_guides_stand_for_keys_that_are_not_given() -> None:
    found = built({}, VLLM_ASCEND_ENABLE_NZ="2", VLLM_ASCEND_ENABLE_MLAPO="1")
    assert found.flags.additional_config.weight_nz_mode == 2
    assert found.flags.additional_config.enable_mlapo
    assert found.origins[f"{X}.weight_nz_mode"] == "VLLM_ASCEND_ENABLE_NZ"
    found = built({X: {"weight_nz_mode": 1}}, VLLM_ASCEND_ENABLE_NZ="2")
    assert found.flags.additional_config.weight_nz_mode == 1
    assert found.lines == (
        "VLLM_ASCEND_ENABLE_NZ: no effect: --additional-config weight_nz_mode wins",
    )


def test_a_variable_without_sense_is_named_itself() -> None:
    problems = built({}, VLLM_ASCEND_ENABLE_NZ="7").problems
    assert len(problems) == 1
    assert problems[0].startswith("VLLM_ASCEND_ENABLE_NZ=7: ")
