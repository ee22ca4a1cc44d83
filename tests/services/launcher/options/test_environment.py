import pytest

from services.launcher.options.environment import (
    LEGACY,
    AllocConf,
    legacy_keys,
    read_environment,
)


def test_variables_are_typed_and_others_left_alone() -> None:
    environment, problems = read_environment(
        {
            "HCCL_BUFFSIZE": "200",
            "HCCL_OP_EXPANSION_MODE": "AIV",
            "VLLM_PP_LAYER_PARTITION": "41, 37",
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:8",
            "DYNAMIC_EPLB": "true",
            "HCCL_IF_IP": "",
            "PATH": "/bin",
        }
    )
    assert not problems
    assert environment.HCCL_BUFFSIZE == 200
    assert environment.VLLM_PP_LAYER_PARTITION == [41, 37]
    assert AllocConf(expandable_segments=True) == environment.PYTORCH_NPU_ALLOC_CONF
    assert environment.DYNAMIC_EPLB is True
    assert environment.HCCL_IF_IP is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HCCL_BUFFSIZE", "0"),
        ("HCCL_BUFFSIZE", "200MB"),
        ("HCCL_OP_EXPANSION_MODE", "AI"),
        ("HCCL_INTRA_ROCE_ENABLE", "2"),
        ("HCCL_CONNECT_TIMEOUT", "60"),
        ("VLLM_PP_LAYER_PARTITION", "41,x"),
        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:perhaps"),
        ("DYNAMIC_EPLB", "perhaps"),
    ],
)
def test_a_variable_without_sense_is_named_with_its_value(name: str, value: str) -> None:
    environment, problems = read_environment({name: value, "HCCL_IF_IP": "10.0.0.1"})
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}={value}: ")
    assert environment.HCCL_IF_IP == "10.0.0.1"


def test_older_forms_of_keys_are_found() -> None:
    assert legacy_keys({"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_ASCEND_ENABLE_MLAPO": ""}) == {
        "weight_nz_mode": "VLLM_ASCEND_ENABLE_NZ"
    }
    assert len(set(LEGACY.values())) == len(LEGACY)
