"""The keys of the other flags that take JSON: graphs, drafts, KV transfer, profiling."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from services.launcher.options.fields import Index, OpenOptions, Options, PortBase, Size, Whole


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


class CompilationConfig(Options):
    """`--compilation-config`."""

    cudagraph_mode: (
        Annotated[
            Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"],
            BeforeValidator(_upper),
        ]
        | None
    ) = Field(default=None, description="Which steps are captured as graphs.")
    cudagraph_capture_sizes: list[Size] | None = Field(
        default=None, min_length=1, description="Tokens of the captured steps."
    )
    max_cudagraph_capture_size: Size | None = Field(
        default=None, description="Tokens of the largest captured step."
    )


class SpeculativeConfig(Options):
    """`--speculative-config`."""

    num_speculative_tokens: Annotated[Whole, Field(ge=1, le=128)] = Field(
        description="Draft tokens of a sequence in a step."
    )
    method: str | None = Field(
        default=None, description="mtp, also written deepseek_mtp: the checkpoint's own layer."
    )
    enforce_eager: bool | None = Field(default=None, description="Drafts without graphs.")
    model: str | None = Field(default=None, description="Draft model, for other methods.")
    draft_tensor_parallel_size: Size | None = Field(
        default=None, description="Ranks of the draft model."
    )


class Side(OpenOptions):
    """How one side of a prefill/decode pair is cut: `prefill` and `decode`."""

    dp_size: Size | None = Field(default=None, description="Replicas.")
    tp_size: Size | None = Field(default=None, description="Ranks of a layer.")
    pp_size: Size | None = Field(default=None, description="Stages.")
    pp_layer_partition: str | None = Field(default=None, description="Layers of each stage.")


class ConnectorExtraConfig(OpenOptions):
    """`kv_connector_extra_config`."""

    use_ascend_direct: bool | None = Field(default=None, description="Accepted; read by none.")
    prefill: Side = Side()
    decode: Side = Side()
    connectors: "list[KvTransferConfig] | None" = Field(
        default=None, description="Children of a MultiConnector."
    )
    backend: Literal["mooncake", "memcache", "yuanrong"] = Field(
        default="mooncake", description="Store of an AscendStoreConnector."
    )
    lookup_rpc_port: PortBase = Field(default=0, description="Port of lookups in the store.")
    load_async: bool = Field(default=False, description="Load from the store in the background.")
    consumer_is_to_load: bool = Field(default=False, description="Decode nodes read the store.")
    consumer_is_to_put: bool = Field(default=False, description="Decode nodes fill the store.")
    use_layerwise: bool = Field(default=False, description="Layer by layer.")
    save_decode_cache: bool = Field(default=False, description="Store what was generated, too.")
    discard_partial_chunks: bool = Field(default=True, description="Only whole blocks.")


def _no_extra() -> ConnectorExtraConfig:
    # Each of the two classes mentions the other, so neither can be built while they are read.
    return ConnectorExtraConfig()


class KvTransferConfig(Options):
    """`--kv-transfer-config`."""

    kv_connector: (
        Literal["MooncakeConnectorV1", "MultiConnector", "AscendStoreConnector"] | None
    ) = Field(default=None, description="What moves the blocks.")
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = Field(
        default=None, description="Prefill, decode, or both."
    )
    kv_port: PortBase | None = Field(default=None, description="First port of the side channel.")
    engine_id: str | None = Field(default=None, description="Name of this side.")
    kv_load_failure_policy: Literal["fail", "recompute"] = Field(
        default="fail", description="What a failed load does to its request."
    )
    kv_rank: Index | None = Field(default=None, description="Read by no connector of Ascend.")
    kv_connector_extra_config: ConnectorExtraConfig = Field(default_factory=_no_extra)


class ProfilerConfig(Options):
    """`--profiler-config`."""

    profiler: Literal["torch", "cuda"] | None = Field(default=None, description="Which one.")
    torch_profiler_dir: str | None = Field(default=None, description="Where traces go.")
    torch_profiler_with_stack: bool = Field(default=False, description="With call stacks.")


class StructuredOutputsConfig(Options):
    """`--structured-outputs-config`."""

    backend: str = Field(default="auto", description="Engine of grammars; guidance is the one.")
    disable_fallback: bool = Field(default=False, description="No other engine instead.")
    disable_any_whitespace: bool = Field(default=False, description="JSON without blanks.")
    disable_additional_properties: bool = Field(
        default=False, description="Objects of declared properties only."
    )
    enable_in_reasoning: bool = Field(default=False, description="Constrain the thinking, too.")
