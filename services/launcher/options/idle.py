"""Options that mean nothing here, whatever their value: each is told with its reason, then ignored.

These are options whose result is the same without them: how ranks find each other where there is
one rank, and how a device does what ours does another way.
"""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.environment import Environment
from services.launcher.options.rules import Idle


def _has_one_replica(asked: Deployment) -> bool:
    return asked.flags.data_parallel_size == 1


def _has_one_rank(asked: Deployment) -> bool:
    return asked.flags.tensor_parallel_size == 1


def _has_many_ranks(asked: Deployment) -> bool:
    return asked.replica_size * asked.flags.data_parallel_size > 1


def _spreads_nothing(asked: Deployment) -> bool:
    return asked.ep_size == 1


def _is_on_cpu(asked: Deployment) -> bool:
    return asked.settings.device == "cpu"


def _captures_nothing(asked: Deployment) -> bool:
    is_off = asked.value("compilation_config.cudagraph_mode") == "NONE"
    return is_off or asked.flags.enforce_eager or _is_staged(asked)


def _is_staged(asked: Deployment) -> bool:
    """Whether there are pipeline stages, whose steps are not captured."""
    return asked.flags.pipeline_parallel_size > 1


_EXTRA = "additional_config"
_GRAPH = f"{_EXTRA}.ascend_compilation_config"
# torch_npu and CANN read these themselves, on a device.
_DEVICE_VARIABLES: Final = (
    "environment.PYTORCH_NPU_ALLOC_CONF",
    "environment.ASCEND_RT_VISIBLE_DEVICES",
    "environment.ASCEND_LAUNCH_BLOCKING",
)
_LINKS: Final = tuple(
    f"environment.{name}"
    for name in Environment.model_fields
    if name.startswith(("HCCL_", "GLOO_", "MF_"))
)

IDLE: Final = (
    Idle(
        names=(
            "data_parallel_size_local",
            "data_parallel_start_rank",
            "data_parallel_rank",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            f"{_EXTRA}.enable_balance_scheduling",
        ),
        when=_has_one_replica,
        reason="there is one replica",
    ),
    Idle(
        names=("data_parallel_address", "data_parallel_rpc_port"),
        when=lambda asked: not _has_one_replica(asked) and asked.flags.nnodes == 1,
        reason="replicas of one machine find each other by themselves",
    ),
    Idle(
        names=("master_addr", "master_port"),
        when=lambda asked: asked.flags.nnodes == 1,
        reason="there is one machine",
    ),
    Idle(
        names=("cp_kv_cache_interleave_size",),
        when=lambda asked: asked.flags.decode_context_parallel_size == 1,
        reason="the latent cache is not cut over ranks",
    ),
    Idle(
        names=(
            f"{_EXTRA}.enable_dsa_cp",
            f"{_EXTRA}.enable_flashcomm1",
            f"{_EXTRA}.enable_reduce_sample",
            f"{_EXTRA}.layer_sharding",
        ),
        when=_has_one_rank,
        reason="one rank has whole layers and all tokens",
    ),
    Idle(
        names=(
            "enable_expert_parallel",
            f"{_EXTRA}.enable_fused_mc2",
            f"{_EXTRA}.mega_moe_max_tokens",
            f"{_EXTRA}.enable_mc2_hierarchy_comm",
            f"{_EXTRA}.enable_prefill_mc2",
        ),
        when=_spreads_nothing,
        reason="one rank holds every expert, so no token travels",
    ),
    Idle(
        names=(f"{_EXTRA}.mega_moe_max_tokens",),
        when=lambda asked: not _spreads_nothing(asked),
        reason="no step goes by the operator that it bounds",
    ),
    Idle(
        names=(f"{_EXTRA}.multistream_overlap_shared_expert",),
        when=_is_on_cpu,
        reason="a CPU has one order of work, with the same result",
    ),
    Idle(
        names=(f"{_EXTRA}.enable_mlapo",),
        reason="the steps before attention are single operators, with the same result",
    ),
    Idle(
        names=(f"{_EXTRA}.c8_enable_reshape_optim",),
        reason="8-bit indexer keys are written one way only, with the same result",
    ),
    Idle(
        names=(f"{_EXTRA}.weight_nz_mode",),
        when=lambda asked: asked.flags.additional_config.weight_nz_mode == 2,
        reason="float weights keep the plain layout, with the same result; quantized ones are as "
        "with 1",
    ),
    Idle(
        names=(f"{_EXTRA}.enable_cpu_binding",),
        reason="cores are left to the operating system; --num-threads bounds the worker's threads",
    ),
    Idle(
        names=(f"{_EXTRA}.fuse_muls_add", _GRAPH, f"{_EXTRA}.ascend_fusion_config"),
        reason="no graph is rewritten; the operators in use are those of docs/operators.md",
    ),
    Idle(
        names=(
            "compilation_config.cudagraph_capture_sizes",
            "compilation_config.max_cudagraph_capture_size",
        ),
        when=_captures_nothing,
        reason="no step is captured",
    ),
    Idle(
        names=("compilation_config.cudagraph_mode",),
        when=lambda asked: asked.asks_for_graphs and _is_staged(asked),
        reason="steps of pipeline stages are not captured",
    ),
    Idle(
        names=(f"{_EXTRA}.rejection_sampler_config",),
        when=lambda asked: asked.num_drafts == 0,
        reason="there are no draft tokens to judge",
    ),
    Idle(
        names=(
            f"{_EXTRA}.eplb_config",
            "environment.DYNAMIC_EPLB",
            "environment.EXPERT_MAP_RECORD",
        ),
        when=lambda asked: not asked.flags.additional_config.eplb_config.dynamic_eplb,
        reason="experts stay where they are (eplb_config has no dynamic_eplb)",
    ),
    Idle(
        names=(f"{_EXTRA}.profiling_chunk_config",),
        when=lambda asked: not asked.flags.additional_config.profiling_chunk_config.enabled,
        reason="it is not enabled",
    ),
    Idle(
        names=(f"{_EXTRA}.scheduler_config.dyntra_lb_config",),
        when=lambda asked: (
            not asked.flags.additional_config.scheduler_config.dyntra_lb_config.enabled
        ),
        reason="it is not enabled",
    ),
    Idle(
        names=(f"{_EXTRA}.sparse_kv_offload_config",),
        when=lambda asked: not asked.flags.additional_config.sparse_kv_offload_config.enabled,
        reason="it is not enabled",
    ),
    Idle(
        names=(f"{_EXTRA}.xlite_graph_config",),
        when=lambda asked: not asked.flags.additional_config.xlite_graph_config.enabled,
        reason="it is not enabled",
    ),
    Idle(
        names=("enable_ep_weight_filter",),
        reason="a rank reads only what it keeps, always",
    ),
    Idle(
        names=("trust_remote_code",),
        reason="no code is taken from a checkpoint",
    ),
    Idle(
        names=("kv_transfer_config", "environment.MOONCAKE_CONFIG_PATH"),
        when=lambda asked: asked.value("kv_transfer_config.kv_connector") is None,
        reason="no connector moves KV blocks",
    ),
    Idle(
        names=(
            "guided_decoding_backend",
            "structured_outputs_config",
            "structured_outputs_config.backend",
            "structured_outputs_config.disable_fallback",
        ),
        reason="grammars have one engine",
    ),
    Idle(
        names=("profiler_config",),
        when=lambda asked: asked.value("profiler_config.profiler") is None,
        reason="it names no profiler",
    ),
    Idle(
        names=("settings.gpu_memory_utilization",),
        when=_is_on_cpu,
        reason="on a CPU the cache has --kv-cache-memory-bytes",
    ),
    Idle(names=_DEVICE_VARIABLES, when=_is_on_cpu, reason="the model runs on a CPU"),
    Idle(
        names=_LINKS,
        when=lambda asked: not _has_many_ranks(asked),
        reason="one rank talks to no other",
    ),
    Idle(
        names=tuple(name for name in _LINKS if not name.startswith("environment.GLOO_")),
        when=lambda asked: _has_many_ranks(asked) and _is_on_cpu(asked),
        reason="on a CPU ranks exchange by Gloo",
    ),
    Idle(
        names=("environment.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",),
        reason="the scheduler's --step-timeout-s bounds a step",
    ),
)
