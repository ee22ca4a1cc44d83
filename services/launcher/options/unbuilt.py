"""Options whose feature is not built. Building one means deleting its line here.

Asking for one ends the start and names it; a value that asks for nothing is fine.
"""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.rules import Unbuilt

_RANKS = "ranks of one machine are built"
_CUTS = "layers are cut over the ranks of a stage, in one way"
_EXCHANGE = "tokens travel to experts in the way that the worker chooses"
_ONE_FRONT = "one scheduler places the requests of all replicas"
_ADAPTERS = "adapters are not built"
_ENGINES = ("auto", "guidance")
_BACKEND = "structured_outputs_config.backend"
_TLS = "TLS is left to a proxy in front"
_LOAD = "experts stay where they are"


def _has_ranks(asked: Deployment) -> bool:
    return asked.flags.tensor_parallel_size > 1


def _has_replicas(asked: Deployment) -> bool:
    return asked.flags.data_parallel_size > 1


def _starts_late(asked: Deployment) -> bool:
    return _has_replicas(asked) and bool(asked.flags.data_parallel_start_rank)


def _spreads_experts(asked: Deployment) -> bool:
    return asked.ep_size > 1


_EXTRA = "additional_config"
_DRAFTS = "speculative_config"

UNBUILT: Final = (
    # Ranks and replicas
    Unbuilt(
        name="prefill_context_parallel_size", missing="prompts are not cut over ranks of their own"
    ),
    Unbuilt(
        name="decode_context_parallel_size", missing="every rank of a layer has the whole cache"
    ),
    Unbuilt(name="nnodes", missing=_RANKS),
    Unbuilt(
        name="data_parallel_size_local",
        missing=_RANKS,
        asks=lambda asked: (
            asked.flags.data_parallel_size_local != asked.flags.data_parallel_size
            and _has_replicas(asked)
        ),
    ),
    Unbuilt(name="data_parallel_start_rank", missing=_RANKS, asks=_starts_late),
    Unbuilt(name="data_parallel_rank", missing=_RANKS, asks=_has_replicas),
    Unbuilt(name="data_parallel_hybrid_lb", missing=_ONE_FRONT, asks=_has_replicas),
    Unbuilt(name="data_parallel_external_lb", missing=_ONE_FRONT, asks=_has_replicas),
    Unbuilt(name="headless", missing="each machine serves HTTP"),
    Unbuilt(
        name="distributed_executor_backend",
        missing="ranks are started as processes of this machine (mp or uni)",
        asks=lambda asked: asked.flags.distributed_executor_backend not in {"mp", "uni"},
    ),
    Unbuilt(name="data_parallel_backend", missing="ranks are started as processes of this machine"),
    Unbuilt(
        name="api_server_count",
        missing="each machine serves HTTP (1 or more)",
        asks=lambda asked: asked.flags.api_server_count == 0,
    ),
    Unbuilt(name=f"{_EXTRA}.layer_sharding", missing=_CUTS, asks=_has_ranks),
    Unbuilt(
        name=f"{_EXTRA}.enable_reduce_sample",
        missing="one rank samples from whole logits",
        asks=_has_ranks,
    ),
    Unbuilt(name=f"{_EXTRA}.enable_shared_expert_dp", missing=_CUTS, asks=_has_ranks),
    Unbuilt(
        name=f"{_EXTRA}.enable_balance_scheduling",
        missing="requests go where least is to do, always",
        asks=_has_replicas,
    ),
    Unbuilt(name=f"{_EXTRA}.enable_fused_mc2", missing=_EXCHANGE, asks=_spreads_experts),
    Unbuilt(name=f"{_EXTRA}.enable_mc2_hierarchy_comm", missing=_EXCHANGE, asks=_spreads_experts),
    Unbuilt(name=f"{_EXTRA}.enable_prefill_mc2", missing=_EXCHANGE, asks=_spreads_experts),
    Unbuilt(name=f"{_EXTRA}.finegrained_tp_config", missing=_CUTS),
    # Experts
    Unbuilt(name="enable_eplb", missing=_LOAD),
    Unbuilt(
        name=f"{_EXTRA}.eplb_config",
        missing=_LOAD,
        asks=lambda asked: (
            asked.flags.additional_config.eplb_config.dynamic_eplb
            or asked.is_asked(f"{_EXTRA}.eplb_config.expert_map_path")
            or asked.is_asked(f"{_EXTRA}.eplb_config.expert_map_record_path")
        ),
    ),
    Unbuilt(name=f"{_EXTRA}.mix_placement", missing="the shared expert is not routed"),
    # Drafts, graphs, scheduling
    Unbuilt(
        name=f"{_DRAFTS}.method",
        missing="drafts come from the checkpoint's own layer (only mtp or deepseek_mtp)",
        asks=lambda asked: asked.value(f"{_DRAFTS}.method") not in {"mtp", "deepseek_mtp"},
    ),
    Unbuilt(name=f"{_DRAFTS}.model", missing="drafts come from the checkpoint's own layer"),
    Unbuilt(
        name=f"{_DRAFTS}.draft_tensor_parallel_size",
        missing="drafts come from the model's own ranks",
        asks=lambda asked: (
            asked.value(f"{_DRAFTS}.draft_tensor_parallel_size") != asked.flags.tensor_parallel_size
        ),
    ),
    Unbuilt(
        name=f"{_EXTRA}.dynamic_spec_config",
        missing="the number of drafts is the same in each step",
    ),
    Unbuilt(
        name="compilation_config.cudagraph_mode",
        missing="decode steps are captured whole (only FULL_DECODE_ONLY or NONE)",
        asks=lambda asked: (
            asked.value("compilation_config.cudagraph_mode")
            not in {None, "NONE", "FULL_DECODE_ONLY"}
        ),
    ),
    Unbuilt(
        name=f"{_EXTRA}.xlite_graph_config",
        missing="steps are captured by torch_npu alone",
        asks=lambda asked: asked.flags.additional_config.xlite_graph_config.enabled,
    ),
    Unbuilt(name="enable_chunked_prefill", missing="prompts are always computed in chunks"),
    Unbuilt(
        name=f"{_EXTRA}.recompute_scheduler_enable", missing="prefill and decode are not split"
    ),
    Unbuilt(
        name=f"{_EXTRA}.profiling_chunk_config",
        missing="prompts are cut by tokens",
        asks=lambda asked: asked.flags.additional_config.profiling_chunk_config.enabled,
    ),
    Unbuilt(
        name=f"{_EXTRA}.scheduler_config.dyntra_lb_config",
        missing="requests go where least is to do, always",
        asks=lambda asked: asked.flags.additional_config.scheduler_config.dyntra_lb_config.enabled,
    ),
    # KV blocks
    Unbuilt(
        name="prefix_caching_hash_algo",
        missing="a faster hash would let prompts be made that hit others' blocks (only sha256)",
        asks=lambda asked: asked.flags.prefix_caching_hash_algo != "sha256",
    ),
    Unbuilt(
        name="kv_transfer_config",
        missing="moving KV blocks between deployments is not built",
        asks=lambda asked: asked.value("kv_transfer_config.kv_connector") is not None,
    ),
    Unbuilt(name="kv_offloading_size", missing="KV offloading is not built"),
    Unbuilt(
        name=f"{_EXTRA}.sparse_kv_offload_config",
        missing="KV offloading is not built",
        asks=lambda asked: asked.flags.additional_config.sparse_kv_offload_config.enabled,
    ),
    Unbuilt(name=f"{_EXTRA}.enable_kv_nz", missing="caches have the ND layout"),
    Unbuilt(
        name="kv_cache_dtype",
        missing="the cache has the model's number type (only auto or bfloat16)",
        asks=lambda asked: asked.flags.kv_cache_dtype != "bfloat16",
    ),
    # Weights
    Unbuilt(
        name="safetensors_load_strategy",
        missing="files are read lazy, eager or by prefetch",
        asks=lambda asked: asked.flags.safetensors_load_strategy == "torchao",
    ),
    Unbuilt(
        name="load_format",
        missing="only safetensors are read (only auto or safetensors)",
        asks=lambda asked: asked.flags.load_format != "safetensors",
    ),
    Unbuilt(name="cpu_offload_gb", missing="offloading weights is not built"),
    Unbuilt(name="enable_sleep_mode", missing="the device is held until the end"),
    Unbuilt(name="enable_lora", missing=_ADAPTERS),
    Unbuilt(name="lora_modules", missing=_ADAPTERS),
    # The edge
    Unbuilt(name="chat_template", missing="the checkpoint's own template is used"),
    Unbuilt(name="tokenizer", missing="the checkpoint's own tokenizer is used"),
    Unbuilt(
        name="enable_auto_tool_choice",
        missing="calls are read whenever there are tools; --tool-call-parser none reads none",
    ),
    Unbuilt(
        name="guided_decoding_backend",
        missing="grammars have one engine (only auto or guidance)",
        asks=lambda asked: asked.flags.guided_decoding_backend not in _ENGINES,
    ),
    Unbuilt(
        name=_BACKEND,
        missing="grammars have one engine (only auto or guidance)",
        asks=lambda asked: asked.value(_BACKEND) not in (None, *_ENGINES),
    ),
    Unbuilt(
        name="structured_outputs_config.disable_any_whitespace",
        missing="each request says it of its own JSON",
    ),
    Unbuilt(
        name="structured_outputs_config.disable_additional_properties",
        missing="each request says it of its own schema",
    ),
    Unbuilt(
        name="structured_outputs_config.enable_in_reasoning",
        missing="thinking is not constrained",
    ),
    Unbuilt(
        name="profiler_config",
        missing="profiling through the API is not built",
        asks=lambda asked: asked.value("profiler_config.profiler") is not None,
    ),
    Unbuilt(name="ssl_keyfile", missing=_TLS),
    Unbuilt(name="ssl_certfile", missing=_TLS),
)
