"""Any two options together: read, and then accepted, refused by name or told, but never silent.

The values are those of the GLM-5.2 guide and other legal ones.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from services.launcher.options.build import build
from services.launcher.options.deployment import Deployment, named
from services.launcher.options.environment import read_environment
from services.launcher.options.facts import ModelFacts
from services.launcher.options.judge import judge
from services.launcher.options.passing import AS_IT_IS, LAYOUT, PASSED
from services.launcher.settings import UpSettings
from tests.services.launcher.options.cases import DENSE, NANO, W8A8

X = "additional_config."
VALUES: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1, 2, 3, 4, 8, 16),
    "pipeline_parallel_size": (1, 2),
    "data_parallel_size": (1, 2, 4, 8, 16),
    "data_parallel_size_local": (0, 1, 2),
    "data_parallel_start_rank": (0, 1, 2),
    "data_parallel_rank": (0, 3),
    "data_parallel_address": ("10.0.0.1",),
    "data_parallel_rpc_port": (12980,),
    "data_parallel_backend": ("mp", "ray"),
    "data_parallel_hybrid_lb": (True,),
    "data_parallel_external_lb": (True,),
    "headless": (True,),
    "api_server_count": (0, 1, 4),
    "prefill_context_parallel_size": (1, 2),
    "decode_context_parallel_size": (1, 8, 16),
    "cp_kv_cache_interleave_size": (1, 64, 96, 128),
    "enable_expert_parallel": (True, False),
    "enable_eplb": (True,),
    "distributed_executor_backend": ("mp", "uni", "ray"),
    "nnodes": (1, 2),
    "node_rank": (0, 1),
    "master_addr": ("10.0.0.1",),
    "master_port": (7060,),
    "seed": (0, 1024),
    "quantization": ("ascend", "none"),
    "safetensors_load_strategy": ("none", "lazy", "eager", "prefetch", "torchao"),
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8"),
    "block_size": (64, 128),
    "enable_ep_weight_filter": (True,),
    "enforce_eager": (True, False),
    "enable_prefix_caching": (True, False),
    "prefix_caching_hash_algo": ("sha256", "xxhash"),
    "enable_chunked_prefill": (True, False),
    "async_scheduling": (True, False),
    "scheduling_policy": ("fcfs", "priority"),
    "watermark": (0.05,),
    "long_prefill_token_threshold": (0, 2048),
    "max_num_partial_prefills": (1, 4),
    "max_long_partial_prefills": (1, 2),
    "priority_ageing_s": (0, 10.0),
    "enable_fair_share": (True, False),
    "max_num_queued_reqs": (16,),
    "max_num_queued_tokens": (100_000,),
    "sse_keep_alive_interval": (0.0, 5.0),
    "allowed_origins": ('["*"]',),
    "allowed_methods": ('["GET", "POST"]',),
    "allowed_headers": ('["x-a"]',),
    "allow_credentials": (True, False),
    "enable_auto_tool_choice": (True, False),
    "enable_sleep_mode": (True,),
    "trust_remote_code": (True, False),
    "compilation_config": (
        {},
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL_DECODE_ONLY"},
        {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 16, 128]},
        {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [298]},
    ),
    "speculative_config": tuple(
        {"num_speculative_tokens": number, "method": "deepseek_mtp", "enforce_eager": True}
        for number in (1, 3, 5, 16)
    ),
    "kv_transfer_config": (
        {},
        *(
            {"kv_connector": "MooncakeConnectorV1", "kv_role": role, "kv_port": "30000"}
            for role in ("kv_producer", "kv_consumer", "kv_both")
        ),
    ),
    "profiler_config": ({}, {"profiler": "torch", "torch_profiler_dir": "/x"}),
    **{
        X + key: (True, False)
        for key in (
            "enable_dsa_cp",
            "enable_sparse_sfa_c8",
            "enable_sparse_li_c8",
            "c8_enable_reshape_optim",
            "enable_balance_scheduling",
            "recompute_scheduler_enable",
            "multistream_overlap_shared_expert",
            "enable_flashcomm1",
            "fuse_muls_add",
            "enable_reduce_sample",
            "enable_mlapo",
            "enable_mc2_hierarchy_comm",
            "enable_cpu_binding",
            "enable_shared_expert_dp",
            "mix_placement",
            "enable_kv_nz",
        )
    },
    X + "enable_fused_mc2": (0, 1),
    X + "mega_moe_max_tokens": (8192,),
    X + "weight_nz_mode": (0, 1, 2),
    X + "layer_sharding": (["o_proj"], ["q_b_proj"]),
    X + "ascend_compilation_config": (
        {"enable_npugraph_ex": True, "enable_static_kernel": False},
        {"enable_npugraph_ex": False, "enable_static_kernel": True},
    ),
    X + "eplb_config": ({"dynamic_eplb": True}, {"num_redundant_experts": 8}),
    X + "sparse_kv_offload_config": ({"enabled": True}, {"topk_buffer_size": 8192}),
    X + "scheduler_config": ({"recompute_scheduler_enable": True},),
    X + "no_such_key": (True,),
    "settings.max_num_seqs": (8, 512),
    "settings.max_num_batched_tokens": (192, 16384),
    "settings.max_model_len": (8000, 1048576),
    "settings.gpu_memory_utilization": (0.92,),
    "settings.device": ("cpu", "npu"),
    "settings.tool_call_parser": ("glm47", "none"),
    "environment.HCCL_BUFFSIZE": ("200",),
    "environment.HCCL_INTRA_ROCE_ENABLE": ("1",),
    "environment.HCCL_INTRA_PCIE_ENABLE": ("1",),
    "environment.PYTORCH_NPU_ALLOC_CONF": ("expandable_segments:True",),
    "environment.ASCEND_LAUNCH_BLOCKING": ("1",),
    "environment.ASCEND_RT_VISIBLE_DEVICES": ("0,1",),
    "environment.VLLM_PP_LAYER_PARTITION": ("41,37",),
    "environment.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": ("300", "30000"),
    "environment.DYNAMIC_EPLB": ("true",),
    "environment.MOONCAKE_CONFIG_PATH": ("/x",),
}
# Read by torch_npu and CANN on a device: told on a CPU only.
DEVICE = {name for name in VALUES if name.startswith(("environment.PYTORCH", "environment.ASCEND"))}
HONOURED = {passed.name for passed in PASSED} | set(AS_IT_IS) | set(LAYOUT)


@dataclass(frozen=True)
class Choice:
    """One option with one value."""

    path: str
    value: Any


NUM_PARTS = 8
CHOICES = [Choice(path, value) for path, values in VALUES.items() for value in values]


@functools.cache
def settings_of(*given: tuple[str, Any]) -> UpSettings:
    """Most pairs have no settings, and reading them takes longest."""
    return UpSettings(**dict(given))


def put_together(choices: tuple[Choice, ...], model: ModelFacts) -> tuple[Deployment, list[str]]:
    """The deployment that asks for some choices, with the lines of its reading."""
    flags: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for choice in choices:
        root, _, inner = choice.path.partition(".")
        if root == "settings":
            settings[inner] = choice.value
        elif root == "environment":
            variables[inner] = choice.value
        elif inner:
            flags.setdefault(root, {})[inner] = choice.value
        else:
            flags[root] = choice.value
    built = build(flags, variables)
    environment, wrong = read_environment(variables)
    assert not built.problems
    assert not wrong
    asked = Deployment(
        flags=built.flags,
        settings=settings_of(*settings.items()),
        environment=environment,
        model=model,
        origins=built.origins,
    )
    return asked, list(built.lines)


def check(choices: tuple[Choice, ...], model: ModelFacts) -> None:
    asked, lines = put_together(choices, model)
    verdict = judge(asked)
    for refusal in verdict.refusals:
        assert "--" in refusal or "=" in refusal, refusal
        assert ": " in refusal, refusal
    if verdict.refusals:
        return
    told = "\n".join([*lines, *verdict.lines])
    for choice in choices:
        path = choice.path
        if path.startswith("settings.") and path != "settings.gpu_memory_utilization":
            continue
        if path in HONOURED or (path in DEVICE and asked.settings.device == "npu"):
            continue
        if path == "settings.gpu_memory_utilization" and asked.settings.device == "npu":
            continue
        if path == X + "no_such_key":
            assert "no_such_key: unknown key" in told
        elif path in {"compilation_config"} or not asked.is_asked(path):
            continue
        else:
            assert asked.origins.get(path, named(path)) in told, (choices, told)


@pytest.mark.parametrize("model", [NANO, W8A8, DENSE], ids=["nano", "w8a8", "dense"])
def test_one_option_alone_is_never_silent(model: ModelFacts) -> None:
    for choice in CHOICES:
        check((choice,), model)


# One part takes two seconds of a core that it has to itself.
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_two_options_together_are_never_silent(part: int) -> None:
    pairs = itertools.combinations(CHOICES, 2)
    for pair in itertools.islice(pairs, part, None, NUM_PARTS):
        if pair[0].path != pair[1].path:
            check(pair, NANO)
