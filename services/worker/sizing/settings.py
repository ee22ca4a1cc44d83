"""Flags of `glm-mesh plan`: those of `vllm serve` that bear on memory, under the same names."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from services.worker.model.config import MAX_SPECULATIVE_TOKENS
from services.worker.parallel.hccl import DEFAULT_HCCL_MIB
from services.worker.sizing.hardware import HardwareName
from services.worker.sizing.recipe import SchemeName
from shared.config import ProcessSettings


class PlanSettings(ProcessSettings):
    """Size a deployment without weights or devices: what its memory goes to, and what fits."""

    service: ClassVar[str] = "plan"

    model: Path = Field(description="Checkpoint directory, or a config.json alone.")
    hardware: HardwareName = Field(default="a3", description="Devices: Atlas A2, A3, or a CPU.")
    topology: str | None = Field(
        default=None,
        description="Layout as one text, like dp2,tp8,ep or pp2[41/37],tp16,ep or tp16,dcp16,ep.",
    )
    data_parallel_size: int | None = Field(default=None, ge=1, description="Replicas.")
    pipeline_parallel_size: int | None = Field(default=None, ge=1, description="Stages.")
    tensor_parallel_size: int | None = Field(default=None, ge=1, description="Ranks of a stage.")
    decode_context_parallel_size: int | None = Field(
        default=None, ge=1, description="Ranks that divide cached tokens: 1 or all of a stage."
    )
    enable_expert_parallel: bool = Field(
        default=False, description="Whole experts spread over all replicas' ranks of a stage."
    )
    pp_layer_partition: str | None = Field(
        default=None,
        description="Layers of each stage, like 41,37; VLLM_PP_LAYER_PARTITION is read as well.",
    )
    scheme: Literal["auto"] | SchemeName = Field(
        default="auto", description="Types of the weights; auto: as the checkpoint describes them."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Type of float weights and plain caches."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt plus output; default: the model's own."
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, le=4096, description="Most sequences in a step of a replica."
    )
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Most tokens in a step of a replica."
    )
    at_least: int | None = Field(
        default=None,
        ge=1,
        description="Sequences of full length that must fit at once; default: --max-num-seqs if "
        "given, else 1.",
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SPECULATIVE_TOKENS,
        description="Drafts of a step; the MTP layer is loaded for them.",
    )
    enable_sparse_sfa_c8: bool = Field(default=False, description="Latent cache in eight bits.")
    enable_sparse_li_c8: bool = Field(default=False, description="Indexer keys in eight bits.")
    enable_dsa_cp: bool = Field(
        default=False, description="Tokens, not heads, divided inside attention."
    )
    enable_flashcomm1: bool = Field(
        default=False, description="Tokens divided between blocks too; shared experts whole."
    )
    enforce_eager: bool = Field(default=False, description="No captured graphs.")
    speculative_config: str | None = Field(
        default=None, description="JSON of vLLM; num_speculative_tokens is read."
    )
    additional_config: str | None = Field(
        default=None, description="JSON of vLLM Ascend; the three enable_ keys above are read."
    )
    compilation_config: str | None = Field(
        default=None, description="JSON of vLLM; cudagraph_mode and cudagraph_capture_sizes."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of a device's memory to use."
    )
    hccl_buffsize: int | None = Field(
        default=None,
        ge=1,
        description=f"MiB of a communicator's buffer; default: HCCL_BUFFSIZE, else "
        f"{DEFAULT_HCCL_MIB}.",
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of KV cache; default: 512 MiB on a CPU, what is left on a device.",
    )
    output: Literal["table", "json"] = Field(
        default="table", description="What to print; --json is short for --output json."
    )
