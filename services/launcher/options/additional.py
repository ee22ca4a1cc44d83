"""The keys of `--additional-config`: how vLLM's Ascend plugin is told what vLLM has no flag for.

Defaults are what happens here. Where vllm-ascend switches something on by itself that has no
counterpart here, the default is None: naming it, on or off, is then told to have no effect.
"""

from typing import Annotated, Literal

from pydantic import Field

from services.launcher.options.fields import Index, OpenOptions, Size, Whole


class AscendCompilationConfig(OpenOptions):
    """`ascend_compilation_config`: what is done to a graph before it is captured."""

    enable_npugraph_ex: bool | None = Field(default=None, description="Graph backend npugraph_ex.")
    enable_static_kernel: bool = Field(default=False, description="Kernels compiled per shape.")
    fuse_norm_quant: bool | None = Field(default=None, description="Fuse norm and quantization.")
    fuse_qknorm_rope: bool | None = Field(default=None, description="Fuse query norm and rope.")
    fuse_muls_add: bool | None = Field(default=None, description="Fuse multiply and add.")


class AscendFusionConfig(OpenOptions):
    """`ascend_fusion_config`."""

    fusion_ops_gmmswigluquant: bool | None = Field(
        default=None, description="Experts with activation and quantization in the product."
    )


class EplbConfig(OpenOptions):
    """`eplb_config`: moving experts between ranks by their load."""

    dynamic_eplb: bool = Field(default=False, description="Move experts while serving.")
    expert_map_path: str | None = Field(default=None, description="Fixed placement to load.")
    expert_map_record_path: str | None = Field(default=None, description="Where to record one.")
    expert_heat_collection_interval: Size = Field(
        default=600, description="Steps in which load is counted."
    )
    algorithm_execution_interval: Size = Field(default=50, description="Steps given to planning.")
    num_redundant_experts: Index = Field(default=0, description="Copies of busy experts.")
    eplb_policy_type: Annotated[Whole, Field(ge=0, le=3)] = Field(
        default=2, description="Planner: 0 random, 1 default, 2 swift, 3 flashlb."
    )
    eplb_heat_collection_stage: Literal["all", "prefill", "decode"] = Field(
        default="all", description="Steps that count."
    )


class FinegrainedTpConfig(OpenOptions):
    """`finegrained_tp_config`: single layers cut over data-parallel ranks; 0 is off."""

    oproj_tensor_parallel_size: Index = Field(default=0, description="Attention's output.")
    lmhead_tensor_parallel_size: Index = Field(default=0, description="Output head.")
    embedding_tensor_parallel_size: Index = Field(default=0, description="Embedding.")
    mlp_tensor_parallel_size: Index = Field(default=0, description="Dense layers.")


class Enabled(OpenOptions):
    """A scheduler extension, on or off."""

    enabled: bool = Field(default=False, description="Switch it on.")


class SchedulerConfig(OpenOptions):
    """`scheduler_config`: where newer versions keep these keys; it wins over the outer ones."""

    enable_balance_scheduling: bool | None = Field(
        default=None, description="As the key of this name outside."
    )
    recompute_scheduler_enable: bool | None = Field(
        default=None, description="As the key of this name outside."
    )
    profiling_chunk_config: Enabled | None = Field(
        default=None, description="As the key of this name outside."
    )
    dyntra_lb_config: Enabled = Field(
        default=Enabled(), description="DyntraLB: balance the cache over replicas."
    )


class SparseKvOffloadConfig(OpenOptions):
    """`sparse_kv_offload_config`: latent cache in host memory."""

    enabled: bool = Field(default=False, description="Switch it on.")
    topk_buffer_size: Size = Field(default=4096, description="Tokens kept on the device.")
    dram_size_per_dp_GB: Size = Field(default=128, description="Host memory of a replica.")
    keep_device_kv_cache: bool = Field(default=False, description="Keep the device's copy.")


class RejectionSamplerConfig(OpenOptions):
    """`rejection_sampler_config`: other rules for keeping drafts."""

    enable_block_verify: bool = Field(default=False, description="Judge drafts as a block.")
    enable_entropy_verify: bool = Field(default=False, description="Accept more; lossy.")
    posterior_threshold: float = Field(default=0.95, gt=0, le=1, description="Bound.")
    posterior_alpha: float = Field(default=0.4, ge=0, description="Slope.")


class XliteGraphConfig(OpenOptions):
    """`xlite_graph_config`."""

    enabled: bool = Field(default=False, description="Run the decoder in xlite.")
    full_mode: bool = Field(default=False, description="Prefill as well.")


class DynamicSpecConfig(OpenOptions):
    """`dynamic_spec_config`: draft counts that change while serving."""

    method: str | None = Field(default=None, description="How counts are chosen.")


class AdditionalConfig(OpenOptions):
    """`--additional-config`."""

    enable_sparse_sfa_c8: bool = Field(
        default=False, description="Latent cache of 8 bits, 656 bytes a token and layer."
    )
    enable_sparse_li_c8: bool = Field(
        default=False, description="Indexer keys of 8 bits; both C8 switches are independent."
    )
    c8_enable_reshape_optim: bool = Field(
        default=False, description="Write 8-bit indexer keys without a reshape."
    )
    weight_nz_mode: Annotated[Whole, Field(ge=0, le=2)] | None = Field(
        default=None,
        description="Weights in NZ layout: 0 none, 1 quantized ones, 2 all; the worker's choice "
        "if not given.",
    )
    enable_dsa_cp: bool = Field(
        default=False, description="Cut the tokens of attention over tensor-parallel ranks."
    )
    enable_flashcomm1: bool = Field(
        default=False,
        description="Cut tokens between blocks too: reduce-scatter and all-gather for all-reduce.",
    )
    layer_sharding: list[str] = Field(
        default=[], description="Linear layers whose weights are spread over ranks."
    )
    multistream_overlap_shared_expert: bool = Field(
        default=False, description="Compute the shared expert on a second stream."
    )
    enable_shared_expert_dp: bool = Field(
        default=False, description="Whole shared experts on every rank."
    )
    mix_placement: bool = Field(
        default=False, description="Route the shared expert like the others."
    )
    enable_fused_mc2: Annotated[int, Field(ge=0, le=1)] = Field(
        default=0, description="Dispatch, experts and combine in one operator."
    )
    mega_moe_max_tokens: Size | None = Field(
        default=None, description="Tokens that a rank takes in that operator; more are dropped."
    )
    enable_mc2_hierarchy_comm: bool = Field(
        default=False, description="Dispatch inside a node first."
    )
    enable_prefill_mc2: bool = Field(default=False, description="Dispatch of prefill by MC2.")
    enable_mlapo: bool = Field(
        default=False, description="Attention's projections, norms and rope in one operator."
    )
    fuse_muls_add: bool | None = Field(
        default=None, description="Outer form of the key in `ascend_compilation_config`."
    )
    enable_reduce_sample: bool = Field(
        default=False, description="Sample from the best logits of each rank."
    )
    enable_cpu_binding: bool = Field(default=False, description="Bind threads to cores.")
    enable_kv_nz: bool = Field(default=False, description="Caches in NZ layout.")
    enable_balance_scheduling: bool = Field(
        default=False, description="Replicas admit together, or none does."
    )
    recompute_scheduler_enable: bool = Field(
        default=False, description="A decode node without blocks sends requests back to prefill."
    )
    profiling_chunk_config: Enabled = Field(
        default=Enabled(), description="Chunks of prompts by measured time."
    )
    ascend_compilation_config: AscendCompilationConfig = AscendCompilationConfig()
    ascend_fusion_config: AscendFusionConfig = AscendFusionConfig()
    eplb_config: EplbConfig = EplbConfig()
    finegrained_tp_config: FinegrainedTpConfig = FinegrainedTpConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    sparse_kv_offload_config: SparseKvOffloadConfig = SparseKvOffloadConfig()
    rejection_sampler_config: RejectionSamplerConfig = RejectionSamplerConfig()
    xlite_graph_config: XliteGraphConfig = XliteGraphConfig()
    dynamic_spec_config: DynamicSpecConfig = DynamicSpecConfig()
