"""What is to be sized, complete and checked: model, layout, device and limits of a step."""

from dataclasses import dataclass, field

from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.parallel.hccl import DEFAULT_HCCL_MIB
from services.worker.parallel.topology import Topology
from services.worker.quant.scheme import QuantDescription
from services.worker.sizing.hardware import Hardware
from services.worker.step_sizes import decode_sizes
from shared.errors import ConfigError


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
    is_flashcomm: bool = False
    is_eager: bool = False
    capture_sizes: tuple[int, ...] | None = None
    """Tokens of the captured steps; None: a default for `max_num_seqs`."""
    max_capture_size: int | None = None
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

    @property
    def cuts_tokens(self) -> bool:
        """Whether tensor-parallel ranks share the tokens of a step."""
        has_ranks = self.topology.tensor_parallel_size > 1
        return has_ranks and (self.is_dsa_cp or self.is_flashcomm)

    def captured(self) -> tuple[int, ...]:
        """Tokens of the steps that are captured as graphs, ascending, as a worker chooses them.

        Raises:
            ConfigError: No size is left of those asked for.
        """
        is_staged = self.topology.pipeline_parallel_size > 1
        if self.is_eager or is_staged or not self.hardware.is_npu:
            return ()
        return decode_sizes(
            self,
            asked=self.capture_sizes,
            largest=self.max_capture_size,
            multiple=self.topology.tensor_parallel_size if self.cuts_tokens else 1,
        )
