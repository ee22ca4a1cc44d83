"""What is to be sized, complete and checked: model, layout, device and limits of a step."""

import math
from dataclasses import dataclass, field
from typing import Final

from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.parallel.topology import Topology
from services.worker.quant.scheme import QuantDescription
from services.worker.sizing.hardware import DEFAULT_HCCL_MIB, Hardware
from shared.errors import ConfigError

_MAX_CAPTURED: Final = 512
"""Tokens of the largest step that is captured when nobody says which are (vLLM's limit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One deployment. A suggestion is another one with a field changed."""

    config: ModelConfig
    scheme: str
    """Name of the weights' types; `quantization` has the types themselves."""
    quantization: QuantDescription
    topology: Topology
    hardware: Hardware
    max_model_len: int
    element_bytes: int = 2
    """Of float weights, activations and plain caches."""
    max_num_seqs: int = 256
    """Most sequences in a step of one replica."""
    max_num_batched_tokens: int = 2048
    num_speculative_tokens: int = 0
    """Drafts per step; the MTP layer is loaded if there are any."""
    cache: CacheFormat = field(default_factory=CacheFormat)
    is_dsa_cp: bool = False
    is_eager: bool = False
    capture_sizes: tuple[int, ...] | None = None
    """Tokens of the captured steps; None: a default for `max_num_seqs`."""
    utilization: float = 0.9
    hccl_mib: int = DEFAULT_HCCL_MIB
    kv_cache_bytes: int | None = None
    """Budget for KV blocks set by hand; None: what the device has left."""
    num_full_seqs: int = 1
    """Sequences of `max_model_len` tokens that must fit at once."""

    def __post_init__(self) -> None:
        own = self.config.max_position_embeddings
        if self.max_model_len > own:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is above the model's own {own}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}"
            )
        if self.num_full_seqs > self.max_num_seqs:
            raise ConfigError(
                f"--at-least {self.num_full_seqs} is above --max-num-seqs {self.max_num_seqs}"
            )
        if self.num_speculative_tokens and not self.config.num_nextn_predict_layers:
            raise ConfigError(
                f"--num-speculative-tokens {self.num_speculative_tokens}: the model has no MTP "
                "layer (num_nextn_predict_layers=0)"
            )
        if not self.hardware.is_npu and self.topology.world_size > 1:
            raise ConfigError(
                f"--topology {self.topology} and --hardware cpu: one rank is sized on a CPU"
            )

    @property
    def has_mtp(self) -> bool:
        """Whether the MTP layer is loaded."""
        return self.num_speculative_tokens > 0

    @property
    def decode_tokens(self) -> int:
        """Most tokens of a step in which every sequence decodes."""
        tokens = self.max_num_seqs * (1 + self.num_speculative_tokens)
        return min(tokens, self.max_num_batched_tokens)

    def captured(self) -> tuple[int, ...]:
        """Tokens of the steps that are captured as graphs, ascending."""
        if self.is_eager or not self.hardware.is_npu:
            return ()
        # Every row of a decode step has 1 + k tokens, and ranks split them evenly.
        multiple = 1 + self.num_speculative_tokens
        if self.is_dsa_cp:
            multiple = math.lcm(multiple, self.topology.tensor_parallel_size)
        sizes = self.capture_sizes
        if sizes is None:
            limit = min(self.decode_tokens, _MAX_CAPTURED)
            steps = (1, 2, 4, *range(8, 256, 8), *range(256, _MAX_CAPTURED + 1, 16))
            sizes = (*(size for size in steps if size < limit), limit)
        return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))
