"""Settings of `glm-mesh up`."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from shared.config import ProcessSettings

# Of one service on this machine: each is an interpreter of 100 MB.
MAX_PROCESSES: Final = 64
_UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")


def read_count(value: object) -> object:
    """Accept `8192`, `8k` (thousands) and `8K` (times 1024), as vLLM does."""
    if not isinstance(value, str):
        return value
    match = _NUMBER.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a number, with k, m, g (thousands) or K, M, G (1024) after it")
    number = float(match[1]) * _UNITS.get(match[2], 1)
    if not number.is_integer():
        raise ValueError("must be a whole number")
    return int(number)


Count = Annotated[int, BeforeValidator(read_count), Field(ge=1)]


def default_model() -> Path:
    """The checkpoint that comes with the project: in the checkout, else in the working folder."""
    checkout = Path(__file__).resolve().parents[2] / "models" / "glm-nano"
    return checkout if checkout.is_dir() else Path("models/glm-nano").absolute()


class UpSettings(ProcessSettings):
    """Start the whole mesh on this machine: frontend, detokenizer, scheduler and worker."""

    service: ClassVar[str] = "up"

    model: Path | None = Field(
        default=None, description="Checkpoint directory; the project's glm-nano if not given."
    )
    host: str = Field(default="127.0.0.1", description="Address on which HTTP is served.")
    port: int = Field(default=8000, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    served_model_name: list[str] = Field(
        default=[], description="Name of the model at the API; may be repeated."
    )
    api_key: list[SecretStr] = Field(
        default=[],
        description="Key that callers must show; may be repeated. GLM_MESH_API_KEY in the "
        "environment keeps it off the command line, which every user can read.",
    )
    max_model_len: Count | None = Field(
        default=None, description="Longest prompt plus output, tokens."
    )
    max_num_seqs: Count | None = Field(default=None, description="Most sequences in a step.")
    max_num_batched_tokens: Count | None = Field(default=None, description="Most tokens in a step.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Type of weights and caches; auto is the checkpoint's own."
    )
    reasoning_parser: Literal["glm45", "none"] = Field(
        default="glm45", description="Dialect of thinking in the model's output."
    )
    tool_call_parser: Literal["glm47", "none"] = Field(
        default="glm47", description="Dialect of tool calls in the model's output."
    )
    worker: Literal["model", "replay"] = Field(
        default="model", description="replay: no model, each request brings its own output."
    )
    kv_cache_memory_bytes: Count | None = Field(
        default=None, description="Memory for the KV cache; 512M on a CPU by default."
    )
    device: Literal["cpu", "npu"] = Field(default="cpu", description="Where the model runs.")
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="Share of an NPU's memory for weights and caches."
    )
    npu_generation: Literal["auto", "a2", "a3", "a5"] | None = Field(
        default=None,
        description="Atlas generation, for the types of 8-bit caches; the device is asked.",
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="Threads of one operator in the worker."
    )
    scheduler_count: int = Field(
        default=1,
        ge=1,
        le=MAX_PROCESSES,
        description="Schedulers, each with workers of its own; detokenizers send a request to the "
        "one that has the start of its prompt, within its share of the load.",
    )
    detokenizer_count: int = Field(
        default=1,
        ge=1,
        le=MAX_PROCESSES,
        description="Detokenizers; each frontend sends a request to the one with the least to do.",
    )
    run_dir: Path | None = Field(
        default=None,
        description="Directory for sockets and logs of one mesh at a time, kept afterwards.",
    )
    drain_timeout_s: float = Field(
        default=10.0, ge=0, description="For running requests to end after Ctrl-C, seconds."
    )
    start_timeout_s: float = Field(
        default=1800.0, gt=0, description="Longest wait until every service is ready, seconds."
    )

    @model_validator(mode="after")
    def _check_model(self) -> "UpSettings":
        if not self.checkpoint.is_dir():
            raise ValueError(f"--model {self.checkpoint}: no such directory")
        return self

    @property
    def checkpoint(self) -> Path:
        """The checkpoint directory, absolute."""
        return default_model() if self.model is None else self.model.absolute()
