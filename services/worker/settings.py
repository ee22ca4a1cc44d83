"""Settings of a worker process."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.worker.model.config import MAX_SPECULATIVE_TOKENS
from services.worker.parallel.topology import Topology, read_partition
from shared.config import ServiceSettings

MIB = 1 << 20


def _no_more_than_tokens(data: dict[str, Any]) -> int:
    # A bad max_num_batched_tokens is not in the data, and is what the error is about.
    num_tokens = int(data.get("max_num_batched_tokens", 256))
    return max(1, min(256, num_tokens // (1 + int(data.get("num_speculative_tokens", 0)))))


class WorkerSettings(ServiceSettings):
    """Flags of `glm-mesh worker`; names and meanings are vLLM's where vLLM has them."""

    service: ClassVar[str] = "worker"

    worker_mode: Literal["model", "replay"] = Field(
        default="model", description="replay: no model, sequences bring their own output."
    )
    model: Path | None = Field(
        default=None, description="Checkpoint directory; a replay worker takes only sizes from it."
    )
    device: Literal["cpu", "npu"] = Field(default="cpu", description="Where the model runs.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Type of weights and caches; auto is the checkpoint's own."
    )
    safetensors_load_strategy: Literal["auto", "lazy", "prefetch", "eager"] = Field(
        default="auto",
        description="How weights are read: lazy in order, prefetch by threads ahead of use, eager "
        "whole files; auto is prefetch unless there is little to read.",
    )
    weight_nz_mode: int = Field(
        default=1,
        ge=0,
        le=2,
        description="Weights in the device's blocked layout: 0 none, 1 quantized ones, 2 all that "
        "can be.",
    )
    num_load_threads: int = Field(
        default=0, ge=0, description="Threads that read weights; 0: two per core, at most 8."
    )
    load_memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Most bytes read ahead of use; 0: 256 MiB, or a tenth of free memory.",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt plus output; default: the model's own."
    )
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="Most tokens in a step.")
    num_speculative_tokens: int = Field(
        default=0,
        ge=0,
        le=MAX_SPECULATIVE_TOKENS,
        description="Drafts of a sequence in a step, proposed by the checkpoint's MTP layer.",
    )
    max_num_seqs: int = Field(
        default_factory=_no_more_than_tokens,
        ge=1,
        le=4096,
        description="Most sequences in a step; default: 256, or what a step holds if fewer.",
    )
    cudagraph_mode: Literal["FULL_DECODE_ONLY", "NONE"] = Field(
        default="FULL_DECODE_ONLY",
        description="Which steps are captured and then run without Python; on a CPU all are.",
    )
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        description="Rows of the captured decode steps; default: those of vLLM, on a CPU any.",
    )
    max_cudagraph_capture_size: int | None = Field(
        default=None, ge=1, description="Rows of the largest captured decode step."
    )
    enforce_eager: bool = Field(default=False, description="Capture no steps.")
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of KV cache; default: 512 MiB on a CPU, what fits on an NPU.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of an NPU's memory for weights and caches."
    )
    enable_sparse_sfa_c8: bool = Field(
        default=False, description="Keep latents in eight bits, packed with their rotated keys."
    )
    enable_sparse_li_c8: bool = Field(
        default=False, description="Keep the indexer's keys in eight bits."
    )
    npu_generation: Literal["auto", "a2", "a3", "a5"] = Field(
        default="auto",
        description="Atlas generation, for the types of 8-bit caches; auto asks the device.",
    )
    num_kv_blocks: int | None = Field(
        default=None, ge=2, description="KV blocks, scratch block 0 included; overrides memory."
    )
    num_threads: int = Field(
        default=0, ge=0, description="Threads of one operator; 0: one per core."
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Ranks that share the layers of a replica's stage."
    )
    pipeline_parallel_size: int = Field(
        default=1, ge=1, description="Stages of a replica, each with some of the layers."
    )
    pp_layer_partition: str | None = Field(
        default=None, description="Layers of each stage, as 41,37; default: as even as possible."
    )
    data_parallel_size: int = Field(
        default=1, ge=1, description="Replicas; they are one world if they share experts."
    )
    data_parallel_rank: int = Field(default=0, ge=0, description="Replica of this process.")
    enable_expert_parallel: bool = Field(
        default=False, description="Keep experts whole, spread over the ranks of all replicas."
    )
    enable_dsa_cp: bool = Field(
        default=False,
        description="Cut the tokens of attention over tensor-parallel ranks, not its heads.",
    )
    enable_flashcomm1: bool = Field(
        default=False,
        description="Cut the tokens between blocks too: reduce-scatter and all-gather in place of "
        "all-reduce, in models with experts, in others for steps above 1000 tokens.",
    )
    multistream_overlap_shared_expert: bool = Field(
        default=False,
        description="Compute shared experts on a second stream of an NPU, beside routed ones.",
    )
    moe_comm_method: Literal["auto", "allgather", "alltoall", "mc2"] = Field(
        default="auto",
        description="How tokens reach experts; auto is the device's choice by tokens of a step, "
        "and another is for CPUs.",
    )
    rank: int = Field(
        default=0,
        ge=0,
        description="Rank of this process in its replica; rank 0 leads and listens at --address.",
    )
    rendezvous: str | None = Field(
        default=None,
        description="Where the ranks of a world meet: file:///path, new at each start, or "
        "tcp://host:port of its first rank.",
    )
    check_rows: bool = Field(
        default=False, description="Compare the rows of a replica's ranks behind every step."
    )
    stall_timeout_s: float = Field(
        default=60.0, gt=0, description="Not serving when one step takes longer, seconds."
    )

    @property
    def captures_steps(self) -> bool:
        """Whether steps are captured where the device can."""
        return self.cudagraph_mode != "NONE" and not self.enforce_eager

    @model_validator(mode="after")
    def _check(self) -> "WorkerSettings":
        if self.worker_mode == "model" and self.model is None:
            raise ValueError("--model is required unless --worker-mode is replay")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}"
            )
        if self.num_speculative_tokens:
            self._check_drafts()
        self._check_ranks()
        return self

    @property
    def topology(self) -> Topology:
        """Ranks and groups of all replicas."""
        partition = self.pp_layer_partition
        return Topology(
            data_parallel_size=self.data_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            layer_partition=read_partition(partition) if partition else (),
        )

    @property
    def is_leader(self) -> bool:
        """Whether this process answers for its replica."""
        return self.rank == 0

    @property
    def world_rank(self) -> int:
        """Number of this process among those that it exchanges tensors with."""
        topology = self.topology
        first = self.data_parallel_rank * topology.replica_size if topology.is_joint else 0
        return first + self.rank

    def _check_ranks(self) -> None:
        topology = self.topology
        if self.rank >= topology.replica_size:
            raise ValueError(f"--rank {self.rank} is not below the {topology.replica_size} ranks")
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"--data-parallel-rank {self.data_parallel_rank} is not below "
                f"--data-parallel-size {self.data_parallel_size}"
            )
        if self.moe_comm_method != "auto":
            self._check_method()
        for name in ("enable_dsa_cp", "enable_flashcomm1"):
            if getattr(self, name) and self.tensor_parallel_size == 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}: tokens are cut over ranks, --tensor-parallel-size is 1")
        if topology.joint_size == 1:
            return
        if self.worker_mode == "replay":
            raise ValueError("--worker-mode replay: a replay worker is one rank")
        if self.rendezvous is None:
            raise ValueError(f"--rendezvous is required for {topology.joint_size} ranks")

    def _check_method(self) -> None:
        flag = f"--moe-comm-method {self.moe_comm_method}"
        if self.device != "cpu":
            raise ValueError(f"{flag}: only on a CPU; a device has limits for each method")
        if self.topology.expert_parallel_size == 1:
            raise ValueError(f"{flag}: no experts are spread over ranks")

    def _check_drafts(self) -> None:
        drafts = f"--num-speculative-tokens {self.num_speculative_tokens}"
        if self.worker_mode == "replay":
            raise ValueError(f"{drafts}: a replay worker has no model that could draft")
        if self.max_num_batched_tokens <= self.num_speculative_tokens:
            raise ValueError(
                f"{drafts}: --max-num-batched-tokens {self.max_num_batched_tokens} must be more"
            )
