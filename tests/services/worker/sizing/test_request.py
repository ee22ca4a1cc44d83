import json
from pathlib import Path

import pytest

from services.worker.model.config import ModelConfig
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.recipe import describe
from services.worker.sizing.request import build_deployment
from services.worker.sizing.settings import PlanSettings
from shared.config import parse
from shared.errors import CheckpointError, ConfigError
from tests.services.worker.sizing.conftest import MODELS


def build(*flags: str, model: Path = MODELS / "glm-5.2", **environment: str) -> Deployment:
    return build_deployment(parse(PlanSettings, ["--model", str(model), *flags]), environment)


def test_a_model_is_a_directory_or_a_config_file(glm: ModelConfig) -> None:
    assert build().config == build(model=MODELS / "glm-5.2" / "config.json").config == glm
    with pytest.raises(ConfigError, match="no such directory or file"):
        build(model=MODELS / "none")
    with pytest.raises(ConfigError, match=r"README.md: cannot be read as JSON"):
        build(model=MODELS / "glm-5.2" / "README.md")


def test_a_layout_is_given_as_text_or_as_flags() -> None:
    flags = ("--data-parallel-size", "2", "--tensor-parallel-size", "8", "--enable-expert-parallel")
    assert build(*flags).topology == build("--topology", "dp2,tp8,ep").topology
    for other in (flags[:2], flags[-1:], ("--pp-layer-partition", "41,37")):
        with pytest.raises(ConfigError, match=f"--topology tp8 and {other[0]}: give one of them"):
            build("--topology", "tp8", *other)


def test_stages_are_read_from_the_environment_as_vllm_does() -> None:
    staged = build("--pipeline-parallel-size", "2", VLLM_PP_LAYER_PARTITION="41,37")
    assert staged.topology.layer_partition == (41, 37)
    # A flag wins, and one stage has nothing to divide.
    flags = ("--pipeline-parallel-size", "2", "--pp-layer-partition", "40,38")
    assert build(*flags, VLLM_PP_LAYER_PARTITION="41,37").topology.layer_partition == (40, 38)
    assert build(VLLM_PP_LAYER_PARTITION="41,37").topology.layer_partition == ()


def test_buffers_are_read_from_flag_or_environment() -> None:
    assert build().hccl_mib == 200
    assert build(HCCL_BUFFSIZE="400").hccl_mib == 400
    assert build("--hccl-buffsize", "768", HCCL_BUFFSIZE="400").hccl_mib == 768
    with pytest.raises(ConfigError, match="HCCL_BUFFSIZE='many'"):
        build(HCCL_BUFFSIZE="many")


def test_json_of_vllm_is_read() -> None:
    deployment = build(
        *("--speculative-config", '{"num_speculative_tokens": 3, "method": "deepseek_mtp"}'),
        "--additional-config",
        '{"enable_dsa_cp": true, "enable_sparse_sfa_c8": true, "enable_sparse_li_c8": false}',
        *("--compilation-config", '{"cudagraph_capture_sizes": [8, 4]}'),
    )
    assert deployment.num_speculative_tokens == 3
    assert deployment.is_dsa_cp
    assert not deployment.is_flashcomm
    assert (deployment.cache.sparse_sfa_c8, deployment.cache.sparse_li_c8) == (True, False)
    assert deployment.captured() == (4, 8)
    assert build("--compilation-config", '{"cudagraph_mode": "NONE"}').captured() == ()
    small = build("--compilation-config", '{"max_cudagraph_capture_size": 9}')
    assert small.captured() == (1, 2, 4, 8, 9)
    for flag in (["--enable-flashcomm1"], ["--additional-config", '{"enable_flashcomm1": true}']):
        assert build(*flag).is_flashcomm
    assert build(VLLM_ASCEND_ENABLE_FLASHCOMM1="1").is_flashcomm


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--speculative-config", "{"], "--speculative-config '{'"),
        (["--speculative-config", "[]"], "must be one JSON object"),
        (["--speculative-config", "{}"], "num_speculative_tokens=None"),
        (["--speculative-config", '{"num_speculative_tokens":16}'], "16: must be .* at most 15"),
        (["--num-speculative-tokens", "16"], "less than or equal to 15"),
        (["--additional-config", '{"enable_dsa_cp": 1}'], "enable_dsa_cp=1: must be true or false"),
        (["--compilation-config", '{"cudagraph_capture_sizes": [0]}'], r"=\[0\]: must be a list"),
        (["--compilation-config", '{"max_cudagraph_capture_size": 0}'], "=0: must be a count"),
        (
            [
                "--num-speculative-tokens",
                "1",
                "--speculative-config",
                '{"num_speculative_tokens":3}',
            ],
            "--num-speculative-tokens 1 and --speculative-config with 3",
        ),
        (
            ["--enable-dsa-cp", "--additional-config", '{"enable_dsa_cp": false}'],
            "--enable-dsa-cp and --additional-config with enable_dsa_cp=false",
        ),
        (["--dtype", "float32"], "--dtype float32 and --hardware a3"),
    ],
)
def test_what_contradicts_itself_is_refused_with_both_names(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(*flags)


def test_limits_default_to_what_a_worker_takes(glm: ModelConfig) -> None:
    deployment = build()
    assert deployment.max_model_len == glm.max_position_embeddings
    assert (deployment.max_num_seqs, deployment.num_full_seqs) == (256, 1)
    assert build("--max-num-batched-tokens", "64").max_num_seqs == 64
    asked = build("--max-num-seqs", "12")
    assert (asked.max_num_seqs, asked.num_full_seqs) == (12, 12)
    assert build("--max-num-seqs", "12", "--at-least", "1").num_full_seqs == 1


def test_a_cpu_has_a_budget_of_its_own() -> None:
    nano = MODELS / "glm-nano"
    assert build("--hardware", "cpu", model=nano).kv_cache_bytes == 512 << 20
    given = build("--hardware", "cpu", "--kv-cache-memory-bytes", "1000", model=nano)
    assert given.kv_cache_bytes == 1000
    wide = build("--hardware", "cpu", "--dtype", "float32", model=nano)
    assert wide.element_bytes == 4


def test_a_checkpoints_own_description_tells_the_types(tmp_path: Path, nano: ModelConfig) -> None:
    config = (MODELS / "glm-nano" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert build("--hardware", "cpu", model=tmp_path).scheme == "bf16"
    types = {name: str(kind) for name, kind in describe(nano, "w8a8").types.items()}
    extra = {"model.layers.1.mlp.experts.7.up_proj.weight": "W8A8_DYNAMIC"}
    description = {"version": "1.0.0", "group_size": 0, **types, **extra}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(description))
    found = build("--hardware", "cpu", model=tmp_path)
    assert found.scheme == "described"
    # All experts of a layer have the type of the first; the others are left out.
    assert found.quantization.types == types
    assert build("--hardware", "cpu", "--scheme", "bf16", model=tmp_path).scheme == "bf16"
    (tmp_path / "quant_model_description.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"quant_model_description\.json"):
        build("--hardware", "cpu", model=tmp_path)
