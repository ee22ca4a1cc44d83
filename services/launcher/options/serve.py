"""The flags of `vllm serve` that `glm-mesh up` reads beside its own.

Defaults are what happens here when a flag is not given. Flags that both programs have (port, model
length, ...) are settings of `up` and not listed.
"""

import textwrap
from typing import Final, Literal

from pydantic import Field

from services.launcher.options.additional import AdditionalConfig
from services.launcher.options.fields import Index, Options, Port, Size, Whole, groups_in
from services.launcher.options.json_flags import (
    CompilationConfig,
    KvTransferConfig,
    ProfilerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from shared.config import flag_of

SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpr": "--data-parallel-start-rank",
    "-dpn": "--data-parallel-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
}


class ServeOptions(Options):
    """Flags of vLLM, one field each."""

    # Weights and cache
    quantization: Literal["ascend", "none"] | None = Field(
        default=None,
        description="`ascend` asserts that the checkpoint has a quant_model_description.json; the "
        "worker finds the file by itself.",
    )
    safetensors_load_strategy: Literal["none", "lazy", "eager", "prefetch", "torchao"] | None = (
        Field(
            default=None,
            description="How the worker reads files: in order, whole, or read ahead; the worker's "
            "choice if not given.",
        )
    )
    load_format: str = Field(default="auto", description="Safetensors are read.")
    enable_ep_weight_filter: bool = Field(
        default=False, description="Skip experts of other ranks while reading."
    )
    kv_cache_dtype: str = Field(
        default="auto", description="The cache has the model's type, or is C8 by its own keys."
    )
    block_size: Size = Field(default=128, description="Tokens of a KV block.")
    enable_prefix_caching: bool = Field(
        default=True, description="Prompts that begin alike share their KV blocks."
    )
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = Field(
        default="sha256", description="How KV blocks are named."
    )
    kv_offloading_size: str | None = Field(default=None, description="KV blocks in host memory.")
    cpu_offload_gb: float = Field(default=0, ge=0, description="Weights in host memory.")
    enable_sleep_mode: bool = Field(default=False, description="Free the device when told.")
    enable_lora: bool = Field(default=False, description="Adapters.")
    lora_modules: list[str] = Field(default=[], description="Adapters to load.")
    chat_template: str | None = Field(default=None, description="The checkpoint's own is used.")
    tokenizer: str | None = Field(default=None, description="The checkpoint's own is used.")
    trust_remote_code: bool = Field(default=False, description="Run code of the checkpoint.")
    # Scheduling and sampling
    seed: Whole | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**63,
        description="Requests without a seed get seeds that follow from this one and from their "
        "order; random ones if not given.",
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="Long prompts take several steps."
    )
    async_scheduling: bool = Field(default=False, description="Plan a step while one runs.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="Who is next: who came first, or whose `priority` is smaller."
    )
    watermark: float = Field(
        default=0.0, ge=0, lt=1, description="Share of KV blocks that admission leaves free."
    )
    long_prefill_token_threshold: int | None = Field(
        default=None,
        ge=0,
        description="A prompt with more tokens to go is long, and gets so many of a step that "
        "others need, too; an eighth of the step if not given, 0: no prompt is long.",
    )
    max_num_partial_prefills: Size = Field(
        default=4, description="Prompts that may be under way at once."
    )
    max_long_partial_prefills: Size = Field(default=3, description="Long prompts among them.")
    prefill_schedule_interval: Size = Field(
        default=2,
        description="Replicas that share experts take prompts in every so many-th step; the "
        "others are captured decode steps.",
    )
    priority_ageing_s: float = Field(
        default=30.0, ge=0, description="Waiting so long makes up for one priority; 0: never."
    )
    enable_fair_share: bool = Field(
        default=True, description="Tenants (API keys) that wait are served in turn, by tokens."
    )
    max_num_queued_reqs: Size = Field(
        default=4096, description="Sequences that may wait; more are answered 429."
    )
    max_num_queued_tokens: Size = Field(
        default=16 << 20, description="Tokens of waiting sequences; more are answered 429."
    )
    enforce_eager: bool = Field(default=False, description="Steps are not captured as graphs.")
    guided_decoding_backend: str = Field(
        default="auto", description="Engine of grammars; guidance is the one."
    )
    structured_outputs_config: StructuredOutputsConfig | None = Field(
        default=None, description="Grammars."
    )
    enable_auto_tool_choice: bool = Field(
        default=True, description="The model decides on tool calls."
    )
    # Ranks
    tensor_parallel_size: Size = Field(default=1, description="Ranks that a layer is cut over.")
    pipeline_parallel_size: Size = Field(default=1, description="Stages of layers.")
    prefill_context_parallel_size: Size = Field(
        default=1, description="Ranks that a prompt is cut over."
    )
    decode_context_parallel_size: Size = Field(
        default=1, description="Ranks that the latent cache is cut over."
    )
    cp_kv_cache_interleave_size: Size = Field(
        default=1, description="Tokens in a row on one of those ranks."
    )
    enable_expert_parallel: bool = Field(
        default=False, description="Whole experts spread over the ranks of all replicas."
    )
    enable_eplb: bool = Field(default=False, description="Move experts by their load.")
    distributed_executor_backend: Literal["mp", "uni", "ray", "external_launcher"] | None = Field(
        default=None, description="How ranks are started."
    )
    nnodes: Size = Field(default=1, description="Machines of the deployment.")
    node_rank: Index = Field(default=0, description="Number of this machine.")
    master_addr: str | None = Field(default=None, description="Address of machine 0.")
    master_port: Port | None = Field(default=None, description="Port of machine 0.")
    # Replicas
    data_parallel_size: Size = Field(default=1, description="Replicas of the deployment.")
    data_parallel_size_local: Index | None = Field(
        default=None, description="Replicas on this machine."
    )
    data_parallel_start_rank: Index | None = Field(
        default=None, description="Number of the first replica on this machine."
    )
    data_parallel_rank: Index | None = Field(
        default=None, description="Number of the only replica of this process."
    )
    data_parallel_address: str | None = Field(default=None, description="Address of replica 0.")
    data_parallel_rpc_port: Port | None = Field(default=None, description="Port of replica 0.")
    data_parallel_backend: Literal["mp", "ray"] = Field(
        default="mp", description="How replicas are started."
    )
    data_parallel_hybrid_lb: bool = Field(
        default=False, description="A front on every machine, for the replicas there."
    )
    data_parallel_external_lb: bool = Field(default=False, description="A front for each replica.")
    headless: bool = Field(default=False, description="No HTTP on this machine.")
    api_server_count: Index | None = Field(
        default=None, description="HTTP processes on the port; one if not given."
    )
    # The edge
    sse_keep_alive_interval: float | None = Field(
        default=None,
        ge=0,
        description="Seconds of silence in a stream before a comment line; 0 is none, 15 if not "
        "given.",
    )
    allowed_origins: str | None = Field(
        default=None, description="JSON list of origins whose pages may ask; none if not given."
    )
    allowed_methods: str | None = Field(
        default=None, description="JSON list of methods that they may use; all if not given."
    )
    allowed_headers: str | None = Field(
        default=None, description="JSON list of headers that they may send; all if not given."
    )
    allow_credentials: bool = Field(
        default=False, description="They may send cookies and keys of the browser."
    )
    ssl_keyfile: str | None = Field(default=None, description="TLS.")
    ssl_certfile: str | None = Field(default=None, description="TLS.")
    # JSON
    compilation_config: CompilationConfig | None = Field(
        default=None, description="Capture of steps as graphs."
    )
    speculative_config: SpeculativeConfig | None = Field(default=None, description="Draft tokens.")
    kv_transfer_config: KvTransferConfig | None = Field(
        default=None, description="Moving KV blocks between deployments."
    )
    profiler_config: ProfilerConfig | None = Field(default=None, description="Profiles on demand.")
    additional_config: AdditionalConfig = Field(
        default=AdditionalConfig(), description="Options of vllm-ascend."
    )


FLAGS: Final = {flag_of(name): name for name in ServeOptions.model_fields}
SWITCHES: Final = {
    name for name, field in ServeOptions.model_fields.items() if field.annotation is bool
}
JSON_FLAGS: Final = {
    name for name, field in ServeOptions.model_fields.items() if groups_in(field.annotation)
}
LISTS: Final = {"lora_modules"}


def help_text() -> str:
    """The flags in alphabetical order, for the end of `--help`."""
    names = textwrap.fill(
        "  ".join(sorted(FLAGS)),
        78,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return f"\noptions of `vllm serve` that are read as well (docs/options.md):\n{names}\n"
